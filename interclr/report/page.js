"use strict";
// The report of one run. Everything about the run comes from the JSON block; whatever it says goes into the document
// as text or as a property, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const content = document.getElementById("content");
  const images = data.images;
  const NS = "http://www.w3.org/2000/svg";

  // Small helpers.

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(properties)) {
      if (key === "class") element.className = value;
      else if (key === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
    return element;
  }

  function draw(tag, attributes, parent) {
    const element = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  }

  function numbers(text, Kind) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Kind(bytes.buffer);
  }

  function show(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    const text = size < 1e-4 ? value.toExponential(1).replace(".0e", "e")
      : size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(size < 1 ? 3 : 4)));
    return text.replace("-", "−");
  }

  /** As short as the margin of a chart is narrow. */
  const showTick = (value) => {
    const text = show(value);
    return text.length <= 6 ? text : value.toExponential(1).replace(".0e", "e").replace(/-/g, "−");
  };

  const cosineText = (value, digits) => value.toFixed(digits).replace("-", "−");

  const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  function section(id, title, about) {
    const heading = make("h2", { id: `${id}-title` }, title);
    const body = make("section", { id, "aria-labelledby": heading.id }, heading, about ? make("p", { class: "about" }, about) : null);
    content.append(body);
    document.getElementById("sections").append(make("a", { href: `#${id}` }, title));
    return body;
  }

  /** Exclusive buttons: arrows move, as in any radio group or tab list. */
  function choice(label, names, choose, role = "radio") {
    const state = role === "tab" ? "aria-selected" : "aria-checked";
    const group = make("div", { class: "choice", role: role === "tab" ? "tablist" : "radiogroup", "aria-label": label });
    const buttons = names.map((name) => make("button", { type: "button", role }, name));
    function select(position, focus) {
      buttons.forEach((button, i) => {
        button.setAttribute(state, String(i === position));
        button.tabIndex = i === position ? 0 : -1;
      });
      if (focus) buttons[position].focus();
      choose(names[position], position);
    }
    buttons.forEach((button, i) => button.addEventListener("click", () => select(i, false)));
    group.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      select((buttons.indexOf(document.activeElement) + step + names.length) % names.length, true);
    });
    group.append(...buttons);
    select(0, false);
    return group;
  }

  // Theme: what the system says, until the button says otherwise.

  const themes = ["Auto", "Light", "Dark"];
  const themeListeners = [];
  const themeButton = document.getElementById("theme");
  let theme = 0;
  function applyTheme() {
    const root = document.documentElement;
    if (theme === 0) root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", themes[theme].toLowerCase());
    themeButton.textContent = themes[theme];
    themeButton.setAttribute("aria-label", `Colour theme: ${themes[theme]}`);
    themeListeners.forEach((listener) => listener());
  }
  themeButton.addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    applyTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);

  // Head of the page.

  document.title = `${data.title} – InterCLR report`;
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.subtitle;
  const notes = document.getElementById("notes");
  notes.hidden = data.notes.length === 0;
  notes.append(...data.notes.map((note) => make("li", {}, note)));
  document.getElementById("figures").append(
    ...data.figures.map((figure) =>
      make("div", {}, make("dt", {}, figure.label), make("dd", { class: "value" }, figure.value),
        figure.detail ? make("dd", { class: "detail" }, figure.detail) : null)),
  );

  // Curves.

  function niceTicks(low, high, wanted) {
    const rough = (high - low) / wanted || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  }

  function chart(curve) {
    const unit = curve.unit ? ` ${curve.unit}` : "";
    const everything = curve.series.flatMap((s) => s.y).concat(curve.level ? [curve.level.y] : []);
    const epochs = curve.series.flatMap((s) => s.x);
    let low = Math.min(...everything), high = Math.max(...everything);
    if (low >= 0 && low < 0.5 * high) low = 0;
    if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
    const marks = niceTicks(low, high, 4), gap = marks[1] - marks[0] || 0; // end on a mark where one is not far
    if (gap && high - marks[marks.length - 1] > 0.3 * gap) high = marks[marks.length - 1] + gap;
    if (gap && marks[0] - low > 0.3 * gap) low = marks[0] - gap;
    if (curve.unit === "%") { low = Math.max(low, 0); high = Math.min(high, 100); }
    const first = Math.min(0, ...epochs), last = Math.max(...epochs) > first ? Math.max(...epochs) : first + 1;
    const summary = curve.series.map((s) => `${s.name} from ${show(s.y[0])} to ${show(s.y[s.y.length - 1])}${unit}`).join("; ");
    const svg = draw("svg", { role: "img", tabindex: "0", "aria-label": `${curve.title} by epoch: ${summary}. Arrow keys read values.` }, document.createElement("div"));
    const tip = make("div", { class: "tip", hidden: true, role: "status" });
    const legend = make("div", { class: "legend" });
    curve.series.forEach((s, i) => legend.append(make("span", {}, keyOf(i), `${s.name} ${show(s.y[s.y.length - 1])}${unit}`)));
    if (curve.level) legend.append(make("span", {}, keyOf(-1), `${curve.level.name} ${show(curve.level.y)}${unit}`));
    const figure = make("figure", { class: "card chart" },
      make("header", {}, make("h3", {}, curve.title), make("span", { class: "muted" }, curve.note)), svg, legend, tip);

    function keyOf(i) {
      const key = make("i", { class: "key" });
      key.style.background = i < 0 ? "var(--soft)" : `var(--c${(i % 4) + 1})`;
      return key;
    }

    let width = 0, cursor = null, at = -1;
    const height = 190, left = 46, right = 10, top = 8, bottom = 22;
    const px = (x) => left + ((x - first) / (last - first)) * (width - left - right);
    const py = (y) => height - bottom - ((y - low) / (high - low)) * (height - top - bottom);

    function render() {
      width = svg.clientWidth || 320;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren();
      for (const tick of niceTicks(low, high, 4)) {
        draw("line", { class: "grid-line", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }, svg);
        draw("text", { class: "axis", x: left - 8, y: py(tick) + 4, "text-anchor": "end" }, svg).textContent = showTick(tick);
      }
      for (const tick of niceTicks(first, last, Math.max(2, width / 90)))
        draw("text", { class: "axis", x: px(tick), y: height - 5, "text-anchor": px(tick) > width - 24 ? "end" : "middle" }, svg).textContent = show(tick);
      if (curve.level) draw("line", { class: "level", x1: left, x2: width - right, y1: py(curve.level.y), y2: py(curve.level.y) }, svg);
      curve.series.forEach((s, i) => {
        const colour = `var(--c${(i % 4) + 1})`;
        const points = s.x.map((x, j) => `${px(x).toFixed(1)},${py(s.y[j]).toFixed(1)}`);
        if (points.length === 1) draw("circle", { cx: px(s.x[0]), cy: py(s.y[0]), r: 3 }, svg).style.fill = colour;
        else draw("polyline", { class: "curve", points: points.join(" ") }, svg).style.stroke = colour;
      });
      cursor = draw("g", {}, svg);
    }

    const stops = [...new Set(epochs)].sort((a, b) => a - b);
    const nearest = (xs, x) => {
      let low = 0, high = xs.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
      return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
    };
    /** A series that begins late or ends early says nothing beyond half a step from its ends. */
    const covers = (xs, x) => {
      const end = xs.length - 1;
      return end === 0 ? x === xs[0] : x >= xs[0] - (xs[1] - xs[0]) / 2 && x <= xs[end] + (xs[end] - xs[end - 1]) / 2;
    };

    function point(stop) {
      at = stop;
      cursor.replaceChildren();
      if (stop < 0) { tip.hidden = true; return; }
      const x = stops[stop];
      draw("line", { class: "cursor", x1: px(x), x2: px(x), y1: top, y2: height - bottom }, cursor);
      tip.replaceChildren(make("div", { class: "muted" }, `epoch ${show(x)}`));
      curve.series.forEach((s, i) => {
        if (!covers(s.x, x)) return;
        const j = nearest(s.x, x);
        draw("circle", { cx: px(s.x[j]), cy: py(s.y[j]), r: 3.5 }, cursor).style.fill = `var(--c${(i % 4) + 1})`;
        tip.append(make("div", { class: "row" }, keyOf(i), s.name, make("b", {}, show(s.y[j]) + unit)));
      });
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect();
      const place = box.left - outer.left + px(x);
      tip.style.left = `${clamp(place > outer.width / 2 ? place - tip.offsetWidth - 12 : place + 12, 4, outer.width - tip.offsetWidth - 4)}px`;
      tip.style.top = `${box.top - outer.top + 4}px`;
    }

    svg.addEventListener("pointermove", (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      point(nearest(stops, first + ((x - left) / (width - left - right)) * (last - first)));
    });
    svg.addEventListener("pointerleave", () => point(-1));
    svg.addEventListener("blur", () => point(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") point(-1);
      else if (event.key === "Home") point(0);
      else if (event.key === "End") point(stops.length - 1);
      else if (step) point(clamp(at < 0 ? (step > 0 ? 0 : stops.length - 1) : at + step, 0, stops.length - 1));
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => { if (svg.clientWidth !== width) render(); }).observe(figure);
    return figure;
  }

  if (data.curves.length) {
    const body = section("curves", "Training", "By epoch. Point at a curve, or focus it and use the arrow keys, to read its values.");
    body.append(make("div", { class: "grid charts" }, ...data.curves.map(chart)));
  }

  if (images) showImages();

  function showImages() {
    const label = images.label ? numbers(images.label, Int32Array) : null;
    const cluster = numbers(images.cluster, Int32Array);
    const nearImage = numbers(images.neighbours.image, Int32Array);
    const nearCosine = numbers(images.neighbours.cosine, Float32Array);
    const thumbnails = images.thumbnails;
    const sheets = thumbnails.sheets.map((source) => { const sheet = new Image(); sheet.src = source; return sheet; });
    const ready = sheets.map((sheet) => sheet.decode().catch(() => undefined));

    const className = (c) => (c < 0 ? "no label" : images.classes[c] ?? `class ${c}`);
    const palette = ["#4269d0", "#efb118", "#e5484d", "#3ca951", "#a463f2", "#12a5b5", "#ff8ab7", "#97632b", "#8d99ae", "#6cc5b0",
      "#f2711c", "#2f4b7c", "#b5cf34", "#c13584", "#7a5c99", "#00735c", "#d0a56b", "#5aa9e6", "#9c2b2b", "#5c6b3a"];
    function colourOf(group) {
      if (group < 0) return "#9aa0a6";
      if (group < palette.length) return palette[group];
      const hue = (group * 137.508) % 360, light = [48, 60, 54][group % 3];
      const f = (n) => { const k = (n + hue / 30) % 12; return Math.round(255 * (light / 100 - 0.6 * Math.min(light / 100, 1 - light / 100) * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); };
      return "#" + [f(0), f(8), f(4)].map((v) => v.toString(16).padStart(2, "0")).join("");
    }

    function cell(i) {
      const on = i % thumbnails.perSheet;
      return [sheets[Math.floor(i / thumbnails.perSheet)], (on % thumbnails.columns) * thumbnails.side, Math.floor(on / thumbnails.columns) * thumbnails.side];
    }

    function paint(canvas, i) {
      const [sheet, x, y] = cell(i), side = thumbnails.side;
      const context = canvas.getContext("2d");
      if (sheet.complete && sheet.naturalWidth) context.drawImage(sheet, x, y, side, side, 0, 0, canvas.width, canvas.height);
    }

    function describe(i) {
      return images.names[i] + (label ? `, ${className(label[i])}` : "") + `, cluster ${cluster[i]}`;
    }

    // Pictures far down the page are painted when they come near the window.
    const painter = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        painter.unobserve(entry.target);
        const i = Number(entry.target.dataset.image);
        ready[Math.floor(i / thumbnails.perSheet)].then(() => paint(entry.target, i));
      }
    }, { rootMargin: "600px" });

    function picture(i, { above = null, below = null, frame = "", meaning = "" } = {}) {
      const alt = describe(i) + (meaning ? `, ${meaning}` : "");
      let view;
      if (images.large[i]) view = make("img", { src: images.large[i], alt, loading: "lazy" });
      else {
        view = make("canvas", { width: thumbnails.side, height: thumbnails.side, role: "img", "aria-label": alt, "data-image": i });
        if (thumbnails.side < 48) view.style.imageRendering = "pixelated";
        painter.observe(view);
      }
      const mark = frame ? make("span", { class: "mark", "aria-hidden": "true" }, frame === "hit" ? "✓" : "✕") : null;
      return make("figure", { class: `picture ${frame}`, title: alt },
        above === null ? null : make("span", { class: "above" }, above),
        make("span", { class: "frame" }, view, mark),
        below === null ? null : make("figcaption", { class: "name" }, below));
    }

    const caption = (i) => (label ? className(label[i]) : images.names[i].split("/").pop());
    const known = (i, j) => label && label[i] >= 0 && label[j] >= 0;

    function neighboursOf(query) {
      const k = images.neighbours.k, row = make("div", { class: "pictures ten" });
      for (let n = query * k; n < (query + 1) * k; n++) {
        const other = nearImage[n];
        const hit = known(query, other) ? label[query] === label[other] : null;
        row.append(picture(other, {
          above: cosineText(nearCosine[n], 3), below: caption(other),
          frame: hit === null ? "" : hit ? "hit" : "miss", meaning: hit === null ? "" : hit ? "same label" : "another label",
        }));
      }
      return row;
    }

    showMap();
    showClusters();
    showRetrieval();
    showNegatives();
    showOdd();

    function showMap() {
      const count = numbers(images.map.image, Int32Array).length;
      const body = section("map", "Map", `${images.map.method} of ${count.toLocaleString("en")} images: near each other is alike to the network. ` +
        "Drag to move; wheel (after a click), buttons or + and − to zoom; 0 shows all; Enter chooses the image at the centre. Far enough in, dots become pictures.");
      const where = numbers(images.map.position, Float32Array), image = numbers(images.map.image, Int32Array);
      const canvas = make("canvas", { class: "points", tabindex: "0", role: "application", "aria-label": `Map of ${count} images. Arrow keys move, plus and minus zoom, Enter chooses the image at the centre.` });
      const ring = make("div", { class: "ring", hidden: true });
      const picked = make("canvas", { width: 96, height: 96 });
      const tipText = make("div", {});
      const tip = make("div", { class: "tip", hidden: true }, picked, tipText);
      const button = (text, name, act) => make("button", { type: "button", "aria-label": name, title: name, on: { click: act } }, text);
      const zoom = make("div", { class: "zoom" }, button("+", "Zoom in", () => zoomAt(1.5)), button("−", "Zoom out", () => zoomAt(1 / 1.5)), button("⤢", "Show all", reset));
      const chips = make("div", { class: "chips", role: "group", "aria-label": "Show only" });
      const search = make("input", { type: "search", placeholder: "Find by file name", "aria-label": "Find by file name" });
      const state = make("span", { class: "muted", role: "status" });
      const chosen = make("div", { class: "chosen card", hidden: true, "aria-live": "polite" });

      let byLabel = label !== null, only = new Set(), text = "";
      let scale = 1, panX = 0, panY = 0, width = 0, height = 0, ratio = 1, pixels = null, waiting = false, hovered = -1;
      const group = new Int32Array(count), active = new Uint8Array(count);
      const lower = images.names.map((name) => name.toLowerCase());
      let colours = new Uint8Array(3 * count);

      const fit = () => 0.45 * Math.min(width, height);
      const screenX = (p) => width / 2 + panX + where[2 * p] * fit() * scale;
      const screenY = (p) => height / 2 + panY - where[2 * p + 1] * fit() * scale;

      // A grid over the unit square answers which point is nearest without looking at all of them.
      const cells = clamp(Math.round(Math.sqrt(count / 3)), 1, 160);
      const cellOf = (v) => clamp(Math.floor(((v + 1) / 2) * cells), 0, cells - 1);
      const starts = new Int32Array(cells * cells + 1), sorted = new Int32Array(count);
      for (let p = 0; p < count; p++) starts[cellOf(where[2 * p + 1]) * cells + cellOf(where[2 * p]) + 1]++;
      for (let c = 0; c < cells * cells; c++) starts[c + 1] += starts[c];
      const next = starts.slice();
      for (let p = 0; p < count; p++) sorted[next[cellOf(where[2 * p + 1]) * cells + cellOf(where[2 * p])]++] = p;

      function nearest(x, y, reach) {
        const unit = fit() * scale, dx = (x - width / 2 - panX) / unit, dy = -(y - height / 2 - panY) / unit, r = reach / unit;
        let best = -1, least = reach * reach;
        for (let row = cellOf(dy - r); row <= cellOf(dy + r); row++)
          for (let s = starts[row * cells + cellOf(dx - r)]; s < starts[row * cells + cellOf(dx + r) + 1]; s++) {
            const p = sorted[s];
            if (!active[p]) continue;
            const distance = (screenX(p) - x) ** 2 + (screenY(p) - y) ** 2;
            if (distance < least) { least = distance; best = p; }
          }
        return best;
      }

      function regroup() {
        let shown = 0;
        for (let p = 0; p < count; p++) {
          const i = image[p];
          group[p] = byLabel ? label[i] : cluster[i];
          active[p] = (only.size === 0 || only.has(group[p])) && (text === "" || lower[i].includes(text)) ? 1 : 0;
          shown += active[p];
          const value = parseInt(colourOf(group[p]).slice(1), 16);
          colours[3 * p] = value >> 16; colours[3 * p + 1] = (value >> 8) & 255; colours[3 * p + 2] = value & 255;
        }
        state.textContent = shown === count ? `${count.toLocaleString("en")} images` : `${shown.toLocaleString("en")} of ${count.toLocaleString("en")} images`;
        hover(-1);
        redraw();
      }

      function regroupChips() {
        const sizes = new Map();
        for (let p = 0; p < count; p++) { const g = byLabel ? label[image[p]] : cluster[image[p]]; sizes.set(g, (sizes.get(g) ?? 0) + 1); }
        const groups = [...sizes.keys()].sort((a, b) => (byLabel ? a - b : sizes.get(b) - sizes.get(a)));
        const title = (g) => (byLabel ? className(g) : `cluster ${g}`);
        chips.replaceChildren();
        if (groups.length <= 24) {
          for (const g of groups) {
            const dot = make("i", { class: "dot" });
            dot.style.background = colourOf(g);
            const chip = make("button", { type: "button", "aria-pressed": "false" }, dot, title(g));
            chip.addEventListener("click", () => {
              if (!only.delete(g)) only.add(g);
              chip.setAttribute("aria-pressed", String(only.has(g)));
              regroup();
            });
            chips.append(chip);
          }
        } else {
          const select = make("select", { "aria-label": "Show only" }, make("option", { value: "" }, byLabel ? "All labels" : `All ${groups.length} clusters`),
            ...groups.map((g) => make("option", { value: g }, `${title(g)} (${sizes.get(g)})`)));
          select.addEventListener("change", () => { only = select.value === "" ? new Set() : new Set([Number(select.value)]); regroup(); });
          chips.append(select);
        }
      }

      // Discs are blended straight into the pixels: a few milliseconds for 20,000, whatever draws the window.
      function disc(radius) {
        const reach = Math.ceil(radius), mask = [];
        for (let y = -reach; y <= reach; y++)
          for (let x = -reach; x <= reach; x++) {
            const alpha = clamp(radius + 0.5 - Math.hypot(x, y), 0, 1);
            if (alpha > 0) mask.push(x, y, Math.round(alpha * 256));
          }
        return { reach, mask: Int32Array.from(mask) };
      }

      function render() {
        waiting = false;
        if (!width || !height) return;
        const context = canvas.getContext("2d");
        const [r, g, b] = getComputedStyle(canvas).backgroundColor.match(/[\d.]+/g).map(Number);
        const across = canvas.width, down = canvas.height, bytes = pixels.data;
        new Uint32Array(bytes.buffer).fill((255 << 24) | (b << 16) | (g << 8) | r);
        const size = clamp((count > 10000 ? 1.5 : count > 3000 ? 2.1 : count > 500 ? 2.8 : 4) * scale ** 0.3, 1.2, 6) * ratio;
        const { reach, mask } = disc(size);
        const inside = [];
        for (let layer = 0; layer < 2; layer++)
          for (let p = 0; p < count; p++) {
            if (active[p] !== layer) continue;
            const x = Math.round(screenX(p) * ratio), y = Math.round(screenY(p) * ratio);
            if (x < reach || y < reach || x >= across - reach || y >= down - reach) continue;
            if (layer && inside.length < 400) inside.push(p);
            const red = layer ? colours[3 * p] : 140, green = layer ? colours[3 * p + 1] : 140, blue = layer ? colours[3 * p + 2] : 140;
            const strength = layer ? 0.85 : 0.16;
            for (let m = 0; m < mask.length; m += 3) {
              const at = 4 * ((y + mask[m + 1]) * across + x + mask[m]), alpha = mask[m + 2] * strength;
              bytes[at] += ((red - bytes[at]) * alpha) >> 8;
              bytes[at + 1] += ((green - bytes[at + 1]) * alpha) >> 8;
              bytes[at + 2] += ((blue - bytes[at + 2]) * alpha) >> 8;
            }
          }
        context.putImageData(pixels, 0, 0);
        if ((scale > 1.5 || count <= 100) && inside.length < 260) {
          const side = (inside.length < 80 && scale > 1.5 ? 56 : Math.min(scale > 1.5 ? 44 : 34, thumbnails.side)) * ratio;
          context.imageSmoothingEnabled = thumbnails.side >= 48;
          context.lineWidth = 2 * ratio;
          for (const p of inside) {
            const [sheet, x, y] = cell(image[p]);
            if (!sheet.complete || !sheet.naturalWidth) continue;
            const left = screenX(p) * ratio - side / 2, top = screenY(p) * ratio - side / 2;
            context.drawImage(sheet, x, y, thumbnails.side, thumbnails.side, left, top, side, side);
            context.strokeStyle = colourOf(group[p]);
            context.strokeRect(left, top, side, side);
          }
        }
        if (hovered >= 0) placeRing();
      }

      function redraw() {
        if (!waiting) { waiting = true; requestAnimationFrame(render); }
      }

      function placeRing() {
        ring.style.left = `${screenX(hovered)}px`;
        ring.style.top = `${screenY(hovered)}px`;
      }

      function hover(p) {
        hovered = p;
        ring.hidden = tip.hidden = p < 0;
        if (p < 0) return;
        placeRing();
        const i = image[p];
        picked.getContext("2d").imageSmoothingEnabled = thumbnails.side >= 48;
        paint(picked, i);
        tipText.replaceChildren(make("div", { class: "name" }, images.names[i]), ...(label ? [make("div", { class: "name" }, className(label[i]))] : []), make("div", { class: "muted" }, `cluster ${cluster[i]}`));
        const x = screenX(p), y = screenY(p);
        tip.style.left = `${clamp(x > width / 2 ? x - tip.offsetWidth - 16 : x + 16, 4, Math.max(4, width - tip.offsetWidth - 4))}px`;
        tip.style.top = `${clamp(y - tip.offsetHeight / 2, 4, Math.max(4, height - tip.offsetHeight - 4))}px`;
      }

      function choosePoint(p) {
        if (p < 0) return;
        const i = image[p];
        chosen.hidden = false;
        chosen.replaceChildren(
          make("h3", { class: "name" }, images.names[i]),
          make("p", { class: "muted name" }, (label ? `${className(label[i])}, ` : "") + `cluster ${cluster[i]}; its nearest images by cosine:`),
          make("div", { class: "rowed" }, picture(i), neighboursOf(i)));
      }

      function zoomAt(factor, x = width / 2, y = height / 2) {
        const before = scale;
        scale = clamp(scale * factor, 0.7, 60);
        panX = (x - width / 2) - ((x - width / 2 - panX) * scale) / before;
        panY = (y - height / 2) - ((y - height / 2 - panY) * scale) / before;
        canvas.style.touchAction = scale > 1.05 ? "none" : "pan-y";
        hover(-1);
        redraw();
      }

      function reset() { scale = 1; panX = panY = 0; canvas.style.touchAction = "pan-y"; hover(-1); redraw(); }

      function pan(dx, dy) { panX += dx; panY += dy; redraw(); }

      const pointers = new Map();
      let moved = 0;
      const local = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
      canvas.addEventListener("pointerdown", (event) => {
        pointers.set(event.pointerId, local(event));
        moved = pointers.size > 1 ? 99 : 0;
        try { canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone already */ }
        canvas.classList.add("held");
      });
      canvas.addEventListener("pointermove", (event) => {
        const now = local(event), before = pointers.get(event.pointerId);
        if (!before) { hover(nearest(...now, 14)); return; }
        if (pointers.size === 2) {
          const other = [...pointers.entries()].find(([id]) => id !== event.pointerId)[1];
          const gap = (a) => Math.hypot(a[0] - other[0], a[1] - other[1]) || 1;
          zoomAt(gap(now) / gap(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
        } else {
          moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
          if (moved > 4) { hover(-1); pan(now[0] - before[0], now[1] - before[1]); }
        }
        pointers.set(event.pointerId, now);
      });
      function release(event) {
        if (!pointers.delete(event.pointerId)) return;
        if (pointers.size === 0) canvas.classList.remove("held");
        if (event.type === "pointerup" && moved <= 4) { const p = nearest(...local(event), 18); hover(p); choosePoint(p); }
      }
      canvas.addEventListener("pointerup", release);
      canvas.addEventListener("pointercancel", release);
      canvas.addEventListener("pointerleave", () => { if (pointers.size === 0) hover(-1); });
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls until the map is clicked
        event.preventDefault();
        zoomAt(Math.exp(-clamp(event.deltaY, -240, 240) / 400), ...local(event));
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
        if (move) { hover(-1); pan(...move); }
        else if (event.key === "+" || event.key === "=") zoomAt(1.4);
        else if (event.key === "-") zoomAt(1 / 1.4);
        else if (event.key === "0") reset();
        else if (event.key === "Escape") hover(-1);
        else if (event.key === "Enter" || event.key === " ") { const p = nearest(width / 2, height / 2, Math.max(width, height)); hover(p); choosePoint(p); }
        else return;
        event.preventDefault();
      });
      search.addEventListener("input", () => { text = search.value.trim().toLowerCase(); regroup(); });

      const controls = make("div", { class: "controls" });
      controls.append(label
        ? choice("Colour by", ["Label", "Cluster"], (_, position) => { byLabel = position === 0; only = new Set(); regroupChips(); regroup(); })
        : make("span", { class: "muted" }, "Coloured by cluster"));
      if (!label) { regroupChips(); regroup(); }
      controls.append(search, state);
      body.append(controls, chips, make("div", { class: "map" }, canvas, make("div", { class: "centre" }), ring, tip, zoom), chosen);
      new ResizeObserver(() => {
        ratio = Math.min(2, devicePixelRatio || 1);
        width = canvas.clientWidth; height = canvas.clientHeight;
        canvas.width = Math.max(1, Math.round(width * ratio)); canvas.height = Math.max(1, Math.round(height * ratio));
        pixels = canvas.getContext("2d").createImageData(canvas.width, canvas.height);
        hover(-1);
        render();
      }).observe(canvas);
      themeListeners.push(redraw);
      Promise.all(ready).then(redraw);
      canvas.reportMap = { count, screen: (p) => [screenX(p), screenY(p)], render, get scale() { return scale; }, get pan() { return [panX, panY]; } }; // for tests
    }

    function showClusters() {
      const { count, orders, shown } = images.clusters;
      const body = section("clusters", "Clusters",
        `${count.toLocaleString("en")} k-means clusters of the ${images.count.toLocaleString("en")} images shown, in the features by which the map and the neighbours are found; of each, members from the most typical to the least.${images.ownBank ? " They are not those of training, whose features are of random views." : ""}`);
      const list = make("div", { class: "grid two", id: "cluster-list", role: "tabpanel", "aria-label": "Clusters" });
      const tabs = choice("Which clusters", Object.keys(orders), (name) => {
        list.replaceChildren(...orders[name].map((id) => {
          const entry = shown[id];
          const facts = [`${entry.size.toLocaleString("en")} image${entry.size === 1 ? "" : "s"}`];
          if (entry.purity !== undefined) facts.push(`purity ${percent(entry.purity)}`);
          facts.push(`mean cosine to centre ${entry.tightness.toFixed(2)}`);
          const mix = entry.classes ? make("div", { class: "mix", role: "img", "aria-label": entry.classes.map(([c, s]) => `${className(c)} ${percent(s)}`).join(", ") }) : null;
          for (const [c, share] of entry.classes ?? []) {
            const part = make("i", { title: `${className(c)} ${percent(share)}` });
            part.style.flex = `0 0 ${100 * share}%`;
            part.style.background = colourOf(c);
            mix.append(part);
          }
          const mostly = entry.classes ? entry.classes.slice(0, 3).map(([c, s]) => `${className(c)} ${percent(s)}`).join(" · ") : null;
          return make("article", { class: "card" }, make("h3", {}, `Cluster ${id}`), make("p", { class: "muted" }, facts.join(" · ")),
            mix, mostly ? make("p", { class: "muted name" }, mostly) : null,
            make("div", { class: "pictures" }, ...entry.members.map((i) => picture(i))));
        }));
      }, "tab");
      body.append(make("div", { class: "controls" }, tabs), list);
    }

    function showRetrieval() {
      const body = section("neighbours", "Neighbours", `The ${images.neighbours.k} nearest images by cosine of the backbone's features, the cosine above each.` +
        (label ? " Green: the same label. Red: another." : " There are no labels to compare with.") + " For any other image, choose it on the map.");
      body.append(make("div", { class: "stack" }, ...images.queries.map((query) =>
        make("article", { class: "card rowed" }, picture(query, { above: "query", below: caption(query) }), neighboursOf(query)))));
    }

    function showNegatives() {
      const found = images.negatives;
      if (!found || !found.anchors.length) return;
      const body = section("negatives", "Negatives", `What each strategy draws for an anchor from other clusters, the cosine above each: the nearest (hard), ` +
        `random among the nearest ${percent(found.poolFraction)} (semi-hard), among all (random), among the farthest ${percent(found.poolFraction)} (semi-easy).` +
        (label ? " Framed red: false negatives, of another cluster but with the anchor's label." : "") +
        (images.ownBank ? " Features and clusters are those of the run's memory bank, made of random views, as training sees them." : " Clusters are those above, since the run has no memory bank to show."));
      const stack = make("div", { class: "stack" });
      if (found.false) {
        const most = Math.max(0.0001, ...Object.values(found.false));
        stack.append(make("div", { class: "card" }, make("h3", {}, "Share of false negatives"),
          make("p", { class: "muted" }, `Of ${found.counted === 1 ? "one negative" : `${found.counted} negatives`} an anchor: as many for every strategy, and no more than the smallest pool holds.`), make("div", { class: "bars", id: "false-negatives" },
          ...Object.entries(found.false).flatMap(([name, share]) => {
            const bar = make("i", {});
            bar.style.width = `${(100 * share) / most}%`;
            return [make("span", {}, name), make("span", { class: "track" }, bar), make("b", {}, percent(share))];
          }))));
      }
      for (const anchor of found.anchors) {
        const rows = Object.entries(anchor.draws).map(([name, drawn]) => make("div", { class: "strategy" }, make("b", {}, name),
          make("div", { class: "pictures ten" }, ...drawn.map(([i, cosine]) => {
            const wrong = known(anchor.image, i) && label[anchor.image] === label[i];
            return picture(i, { above: cosineText(cosine, 2), frame: wrong ? "miss" : "", meaning: wrong ? "false negative" : "" });
          }))));
        const positive = anchor.positive === null || anchor.positive === anchor.image ? null
          : picture(anchor.positive, { above: "positive", below: caption(anchor.positive) });
        stack.append(make("article", { class: "card" }, make("div", { class: "rowed" },
          make("div", { class: "column" }, picture(anchor.image, { above: "anchor", below: caption(anchor.image) }), positive), make("div", { class: "draws" }, ...rows))));
      }
      body.append(stack);
    }

    function showOdd() {
      const body = section("oddities", "Odd images", "Worth a look before the next run: copies waste compute and make neighbours look better than they are; outliers may be broken or out of place.");
      const stack = make("div", { class: "stack" });
      const exact = images.exact;
      if (exact.groups) stack.append(make("div", { class: "card" }, make("h3", {}, "Exact duplicates"),
        make("p", { class: "muted" }, `${exact.surplus.toLocaleString("en")} surplus cop${exact.surplus === 1 ? "y" : "ies"} in ${exact.groups.toLocaleString("en")} group${exact.groups === 1 ? "" : "s"} of equal pixels.`),
        make("div", { class: "pairs" }, ...exact.shown.map((group) => make("div", { class: "pair" }, `${group.count} copies`,
          make("div", { class: "pictures" }, ...group.images.map((i) => picture(i, { below: images.names[i] }))))))));
      const pairs = (title, found, told, measure) => {
        if (found.count) stack.append(make("div", { class: "card" }, make("h3", {}, title),
          make("p", { class: "muted" }, `${told}: the first ${found.shown.length} of ${found.count.toLocaleString("en")} pairs. All of them, with file names, are in ${images.table} beside this page.`),
          make("div", { class: "pairs" }, ...found.shown.map((pair) => make("div", { class: "pair" }, `${measure} ${pair.likeness.toFixed(4)}`,
            make("div", { class: "pictures" }, ...pair.images.map((i) => picture(i, { below: images.names[i] }))))))));
      };
      pairs("Near duplicates", images.near, "Nearly the same picture by its pixels, as when it is resized, compressed again or made brighter", "correlation");
      pairs("Most alike", images.alike, "No copies by their pixels, and closest to the network, each image with its nearest other", "cosine");
      if (images.outliers.length) stack.append(make("div", { class: "card" }, make("h3", {}, "Outliers"),
        make("p", { class: "muted" }, "The lowest mean cosine to their own nearest neighbours, shown above each."),
        make("div", { class: "pictures" }, ...images.outliers.map((entry) => picture(entry.image, { above: cosineText(entry.cosine, 3), below: images.names[entry.image] })))));
      if (!exact.groups) stack.append(make("p", { class: "muted" }, "No two of these images are equal pixel for pixel."));
      body.append(stack);
    }
  }

  // Settings.

  const settings = section("settings", "Settings", null);
  const stack = make("div", { class: "stack" });
  stack.append(make("div", { class: "card" }, ...data.commands.map((command) => {
    const block = make("pre", { class: "command", tabindex: "0" }, command.text);
    const copy = make("button", { type: "button" }, "Copy");
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command.text);
        copy.textContent = "Copied";
      } catch { // a page opened from disk may not: select it instead
        getSelection().selectAllChildren(block);
        copy.textContent = "Selected";
      }
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
    return make("div", { class: "command-row" }, make("header", {}, make("h3", {}, command.label), copy), block);
  })));
  stack.append(make("details", { class: "card" }, make("summary", {}, "Resolved configuration"), make("pre", { tabindex: "0" }, data.config)));
  const facts = Object.entries(data.environment);
  if (facts.length) stack.append(make("details", { class: "card" }, make("summary", {}, "Environment"),
    make("dl", { class: "facts" }, ...facts.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]))));
  settings.append(stack);
  document.getElementById("footer").textContent = `Made by interclr ${data.version}. This file is complete in itself: it loads nothing and sends nothing.`;
})();
