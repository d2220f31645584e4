"""The page in a real browser: Debian's chromium without a window. Skipped, saying so, where it is not installed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE_CLASS, HOSTILE_NAMES, content_of, hostile_folder, inter_run, many_points
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from tiny_runs import tiny, train, write_images

from interclr.report import report
from interclr.report.page import render
from interclr.screen import Screen

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM.exists() and DRIVER.exists()), reason="no browser here: apt-get install chromium chromium-driver"
)

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
QUIET = Screen(quiet=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(inter_run(tmp_path_factory.mktemp("page") / "run"), screen=QUIET)


Open = Callable[..., webdriver.Chrome]


@pytest.fixture
def show(browser: webdriver.Chrome) -> Iterator[Open]:
    """Open a page at a size; at the end nothing may have gone wrong in it."""

    def go(path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> webdriver.Chrome:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        browser.get(path.as_uri())
        browser.execute_script("document.documentElement.style.scrollBehavior = 'auto'")
        return browser

    yield go
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []


def eventually(check: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = check()
        if found:
            return found
        time.sleep(0.03)
    raise AssertionError(f"in vain: {what}")


def find(driver: webdriver.Chrome, selector: str) -> WebElement:
    return driver.find_element(By.CSS_SELECTOR, selector)


def all_of(driver: webdriver.Chrome, selector: str) -> list[WebElement]:
    return driver.find_elements(By.CSS_SELECTOR, selector)


def over_point(driver: webdriver.Chrome, point: int) -> None:
    """Move the mouse over a point of the map, nothing pressed."""
    driver.execute_script(
        """const canvas = document.querySelector("canvas.points"), box = canvas.getBoundingClientRect();
        const [x, y] = canvas.reportMap.screen(arguments[0]);
        canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x, clientY: box.top + y}));""",
        point,
    )


SECTIONS = ["curves", "map", "clusters", "neighbours", "negatives", "oddities", "settings"]


def test_every_section_is_there_and_reachable(show: Open, page: Path) -> None:
    driver = show(page)
    assert [section.get_attribute("id") for section in all_of(driver, "main section")] == SECTIONS
    assert [link.get_attribute("href").partition("#")[2] for link in all_of(driver, "nav a")] == SECTIONS
    assert driver.title == "MoCo v2 + InterCLR on synthetic train – InterCLR report"
    assert len(all_of(driver, "#figures > div")) == 6
    assert all_of(driver, ".picture.hit")
    assert "interclr pretrain" in find(driver, "pre.command").text
    assert not find(driver, "details pre").is_displayed()
    find(driver, "details summary").send_keys(Keys.ENTER)
    assert "semi_hard" in find(driver, "details pre").text
    driver.execute_script("document.querySelectorAll('.picture')[0].scrollIntoView()")


def test_curves_show_their_values(show: Open, page: Path) -> None:
    driver = show(page)
    chart = find(driver, ".chart svg")
    tip = find(driver, ".chart .tip")
    assert not tip.is_displayed()
    ActionChains(driver).move_to_element(chart).perform()
    eventually(tip.is_displayed, "a tip on hover")
    assert "epoch" in tip.text
    assert "intra" in tip.text
    driver.execute_script("document.querySelector('.chart svg').focus()")
    chart.send_keys(Keys.HOME)
    first = tip.text
    chart.send_keys(Keys.ARROW_RIGHT)
    assert tip.text != first
    chart.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_a_series_says_nothing_of_epochs_it_does_not_have(show: Open, page: Path, tmp_path: Path) -> None:
    """The inter branch begins late: its first value is not one of the epochs before."""
    whole = {"name": "total", "x": [0.78, 0.94, 1.09, 1.25], "y": [4, 3, 2, 1]}
    series = [whole, {"name": "inter", "x": [1.09, 1.25], "y": [7, 6]}, {"name": "once", "x": [1.25], "y": [5]}]
    curve = {"title": "Loss", "unit": "", "note": "", "series": series, "level": None}
    written = tmp_path / "late.html"
    written.write_text(render(content_of(page.read_text()) | {"curves": [curve]}))
    driver = show(written)
    chart = find(driver, ".chart svg")
    driver.execute_script("arguments[0].focus()", chart)
    shown = []
    for key in (Keys.HOME, *[Keys.ARROW_RIGHT] * 3):
        chart.send_keys(key)
        names = [row.text.split()[0] for row in all_of(driver, ".chart .tip .row")]
        assert len(all_of(driver, ".chart svg g circle")) == len(names)
        shown.append(names)
    assert shown == [["total"], ["total"], ["total", "inter"], ["total", "inter", "once"]]


@pytest.mark.parametrize(
    ("values", "ends"), [([100, 100], ("90", "100")), ([31, 99.5], ("0", "100")), ([0, 0], ("0", "1"))]
)
def test_percentages_end_at_a_hundred(
    show: Open, page: Path, tmp_path: Path, values: list[float], ends: tuple[str, str]
) -> None:
    curve = {"title": "k-NN", "unit": "%", "note": "", "level": None}
    curve["series"] = [{"name": "k-NN", "x": [0, 1], "y": values}]
    written = tmp_path / "percent.html"
    written.write_text(render(content_of(page.read_text()) | {"curves": [curve]}))
    driver = show(written)
    marks = [mark.text for mark in all_of(driver, ".chart svg text.axis")][: len(all_of(driver, ".chart .grid-line"))]
    assert (marks[0], marks[-1]) == ends


def test_the_map_shows_an_image_and_its_neighbours(show: Open, page: Path) -> None:
    driver = show(page)
    find(driver, "canvas.points")
    driver.execute_script("document.querySelector('.map').scrollIntoView({block: 'center'})")
    over_point(driver, 7)
    tip = find(driver, ".map .tip")
    assert tip.is_displayed()
    assert "synthetic/train/" in tip.text
    shown = "return arguments[0].getContext('2d').getImageData(0, 0, 96, 96).data.some((v) => v > 0)"
    eventually(
        lambda: (over_point(driver, 7), driver.execute_script(shown, find(driver, ".map .tip canvas")))[1],
        "a thumbnail in the tip",
    )
    name = tip.text.splitlines()[0]
    find(driver, "canvas.points").click()  # the middle may be empty, so by keyboard as well
    find(driver, "canvas.points").send_keys(Keys.ENTER)
    chosen = find(driver, ".chosen")
    eventually(chosen.is_displayed, "the chosen image")
    assert len(chosen.find_elements(By.CSS_SELECTOR, ".pictures .picture")) == 10
    assert name.startswith("synthetic/train/")


def test_the_map_moves_and_zooms_by_mouse_and_keyboard(show: Open, page: Path) -> None:
    driver = show(page)
    state = "const m = document.querySelector('canvas.points').reportMap; return [m.scale, ...m.pan]"
    canvas = find(driver, "canvas.points")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(driver).move_to_element(canvas).click_and_hold().move_by_offset(50, 30).release().perform()
    assert driver.execute_script(state) == [1, 50, 30]
    canvas.send_keys("+")
    assert driver.execute_script(state)[0] == pytest.approx(1.4)
    canvas.send_keys(Keys.ARROW_LEFT)
    canvas.send_keys("0")
    assert driver.execute_script(state) == [1, 0, 0]
    find(driver, ".zoom button").click()
    assert driver.execute_script(state)[0] == pytest.approx(1.5)


def test_switches_and_filters_by_mouse_and_keyboard(show: Open, page: Path) -> None:
    driver = show(page)
    status = find(driver, "#map .controls [role=status]")
    assert status.text == "64 images"
    chips = all_of(driver, "#map .chips button")
    names = [chip.text for chip in chips]
    chips[0].click()
    fewer = status.text
    assert fewer.endswith("of 64 images")
    chips[1].send_keys(Keys.SPACE)
    assert status.text != fewer
    search = find(driver, "#map input[type=search]")
    search.send_keys("no such name")
    assert status.text == "0 of 64 images"
    label, cluster = all_of(driver, "#map [role=radio]")
    search.clear()
    search.send_keys("0001", Keys.BACKSPACE * 4)
    label.send_keys(Keys.ARROW_RIGHT)
    assert cluster.get_attribute("aria-checked") == "true"
    assert [chip.text for chip in all_of(driver, "#map .chips button")] != names
    assert status.text == "64 images"
    tabs = all_of(driver, "#clusters [role=tab]")
    assert [tab.text for tab in tabs] == ["Largest", "Smallest", "Purest", "Most mixed"]
    before = find(driver, "#cluster-list").text
    tabs[1].click()
    assert find(driver, "#cluster-list").text != before
    tabs[1].send_keys(Keys.ARROW_LEFT)
    assert find(driver, "#cluster-list").text == before


def test_dark_by_the_system_and_by_the_button(show: Open, page: Path) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light = show(page).execute_script(background)
    driver = show(page, dark=True)
    dark = driver.execute_script(background)
    assert light == "rgb(251, 251, 250)"
    assert dark == "rgb(21, 23, 26)"
    button = find(driver, "#theme")
    button.click()
    assert (button.text, driver.execute_script(background)) == ("Light", light)
    button.send_keys(Keys.ENTER)
    assert (button.text, driver.execute_script(background)) == ("Dark", dark)


def test_nothing_sticks_out_on_a_phone(show: Open, page: Path) -> None:
    driver = show(page, 375, 740)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 375
    assert find(driver, "canvas.points").size["width"] <= 375


def test_hostile_names_stay_text(show: Open, tmp_path: Path, out: Path) -> None:
    hostile_folder(tmp_path / "images")
    train(tiny(f"data.source={tmp_path / 'images'}", "schedule.epochs=1", "data.batch=8"), out)
    written = report(out, screen=QUIET)
    driver = show(written)
    titles = " ".join(picture.get_attribute("title") for picture in all_of(driver, ".picture"))
    assert HOSTILE_CLASS in titles
    assert any(name in titles for name in HOSTILE_NAMES)
    position = content_of(written.read_text())["images"]["names"].index(f"{HOSTILE_CLASS}/{HOSTILE_NAMES[0]}")
    over_point(driver, position)
    assert f"{HOSTILE_CLASS}/{HOSTILE_NAMES[0]}" in find(driver, ".map .tip").text
    assert HOSTILE_CLASS in find(driver, "#map .chips").text
    assert len(all_of(driver, "script")) == 2
    assert all_of(driver, "img[src=x], main b > b") == []
    driver.execute_script("return 1")  # an open alert would raise here


def test_without_labels_nothing_is_broken(show: Open, tmp_path: Path, out: Path) -> None:
    write_images(tmp_path / "images", 12)
    train(tiny(f"data.source={tmp_path / 'images'}", "schedule.epochs=1", "data.batch=4"), out)
    driver = show(report(out, screen=QUIET))
    assert all_of(driver, ".hit, .miss, .mark, .mix, #false-negatives, #map [role=radio]") == []
    assert "k-means" in find(driver, "#clusters").text
    assert "undefined" not in find(driver, "body").text
    assert "NaN" not in find(driver, "body").text


def test_a_page_without_images_still_shows_its_curves(show: Open, page: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.html"
    bare.write_text(render(content_of(page.read_text()) | {"images": None, "notes": ["gone"]}))
    driver = show(bare)
    assert [section.get_attribute("id") for section in all_of(driver, "main section")] == ["curves", "settings"]
    assert find(driver, "#notes").text == "gone"


def test_twenty_thousand_points_answer_within_a_tenth_of_a_second(show: Open, page: Path, tmp_path: Path) -> None:
    large = tmp_path / "large.html"
    large.write_text(render(many_points(content_of(page.read_text()), 20_000)))
    assert large.stat().st_size < 15e6
    driver = show(large)
    eventually(lambda: driver.execute_script("return document.querySelector('canvas.points').reportMap.count"), "map")
    hover, pan = driver.execute_script(
        """const canvas = document.querySelector("canvas.points"), map = canvas.reportMap;
        const box = canvas.getBoundingClientRect();
        const send = (type, x, y) => canvas.dispatchEvent(
          new PointerEvent(type, {clientX: box.left + x, clientY: box.top + y, pointerId: 7}));
        const timed = (act) => { const start = performance.now(); act(); return performance.now() - start; };
        const hover = [], pan = [];
        for (let p = 0; p < 40; p++) {
          const [x, y] = map.screen(p * 37);
          hover.push(timed(() => { send("pointermove", x, y); document.querySelector(".map .tip").offsetHeight; }));
        }
        send("pointerdown", 300, 300);
        for (let i = 1; i < 15; i++)
          pan.push(timed(() => { send("pointermove", 300 + 9 * i, 300 + 5 * i); map.render(); }));
        send("pointerup", 430, 370);
        return [hover, pan];"""
    )
    print(f"hover {statistics.median(hover):.1f} ms, pan {statistics.median(pan):.1f} ms")
    assert find(driver, ".map .ring") is not None
    assert statistics.median(hover) < 100
    assert statistics.median(pan) < 100
