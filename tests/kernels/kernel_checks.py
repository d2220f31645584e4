"""The Triton kernels against their plain twins; ``interpreted.py`` says how these checks are run."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from interclr import kernels
from interclr.bank import MemoryBank
from interclr.data.view_parameters import ATTEMPTS, UNIFORMS, View, parameters_from_uniforms
from interclr.data.views import Views
from interclr.labels.kmeans import kmeans, nearest_centroid
from interclr.losses import cosines, margin_nce
from interclr.samplers import SemiEasy, SemiHard
from interclr.types import Images, Pairs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter's products know no bfloat16


def random_bank(size: int, dim: int, clusters: int, seed: int, dtype: torch.dtype = torch.float32) -> MemoryBank:
    return MemoryBank(size, dim, clusters, 1.0, dtype, torch.Generator().manual_seed(seed)).to(DEVICE)


@given(
    columns=st.integers(1, 700),
    labels=st.integers(1, 5),
    negatives=st.integers(1, 40),
    fraction=st.sampled_from([0.1, 0.37, 1.0]),
    levels=st.sampled_from([1, 3, 1_000_000]),  # few levels: many ties
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_select_pool_is_the_plain_selection(
    columns: int, labels: int, negatives: int, fraction: float, levels: int, seed: int
) -> None:
    from interclr.kernels.select import select_pool

    generator = torch.Generator().manual_seed(seed)
    score = (torch.randint(-levels, levels + 1, (3, columns), generator=generator) / levels).to(DEVICE)
    column_label = torch.randint(labels, (columns,), generator=generator).to(DEVICE)
    row_label = torch.randint(labels, (3,), generator=generator).to(DEVICE)
    chosen = (torch.randperm(5 * columns, generator=generator)[:columns]).to(DEVICE)
    sampler = SemiHard(min(negatives, columns), fraction, candidates=columns)
    index, cosine = sampler._select_plain(score, row_label, column_label, chosen)
    fast = select_pool(
        score.clone(), column_label.int(), row_label.int(), chosen, sampler.negatives, sampler._fraction()
    )
    assert torch.equal(fast[0], index)
    assert torch.equal(fast[1], cosine)


def test_select_pool_of_a_long_row() -> None:
    """Longer than one block, so that counts carry over; negative scores, zeros of both signs, and one label."""
    from interclr.kernels.select import select_pool

    score = torch.randn(2, 9_001, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    score[:, ::5] = 0.0
    score[:, 1::5] = -0.0
    label = torch.randint(7, (9_001,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    chosen = torch.arange(9_001, device=DEVICE)
    sampler = SemiHard(600, 0.1, candidates=9_001)
    own = torch.tensor([3, 99], device=DEVICE)
    index, cosine = sampler._select_plain(score, own, label, chosen)
    fast = select_pool(score.clone(), label.int(), own.int(), chosen, 600, sampler._fraction())
    assert torch.equal(fast[0], index)
    assert torch.equal(fast[1], cosine)
    assert (index >= 0).all()
    alone = select_pool(
        score.clone(), torch.zeros_like(label).int(), torch.zeros_like(own).int(), chosen, 9, sampler._fraction()
    )
    assert (alone[0] == -1).all()
    assert torch.isneginf(alone[1]).all()


@pytest.mark.parametrize("kind", [SemiHard, SemiEasy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_is_the_same_with_and_without_kernels(
    kind: type[SemiHard], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = random_bank(900, 12, 9, 0, dtype)
    query = normalize(torch.randn(7, 12, generator=torch.Generator().manual_seed(1)), dim=1).to(DEVICE)
    index = torch.arange(7, device=DEVICE)
    drawn: list[Pairs] = []
    for wanted in ("1", "0"):
        monkeypatch.setenv("INTERCLR_KERNELS", wanted)
        sampler = kind(30, 0.1, candidates=400)
        generator = torch.Generator(DEVICE).manual_seed(2)
        drawn.append(sampler.draw(query, index, bank, generator, hand_on_cosines=True))
    assert torch.equal(drawn[0].positive, drawn[1].positive)
    assert torch.equal(drawn[0].negative, drawn[1].negative)
    assert drawn[0].cosine is not None
    assert drawn[1].cosine is not None
    assert torch.equal(drawn[0].cosine, drawn[1].cosine)


@pytest.mark.parametrize(("dim", "negatives"), [(5, 3), (32, 70), (40, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [False, True])
def test_cosines_and_their_gradient(
    dim: int, negatives: int, dtype: torch.dtype, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = random_bank(200, dim, 4, 3, dtype)
    generator = torch.Generator().manual_seed(4)
    raw = torch.randn(6, dim, generator=generator).to(DEVICE)
    negative = torch.randint(-1, 200, (6, negatives), generator=generator).to(DEVICE)
    positive = torch.randint(200, (6,), generator=generator).to(DEVICE)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for wanted in ("1", "0"):
        monkeypatch.setenv("INTERCLR_KERNELS", wanted)
        query = normalize(raw, dim=1).requires_grad_()
        handed = None
        if known:
            every = query.detach() @ bank.features.float().T
            handed = every.gather(1, negative.clamp_min(0)).masked_fill(negative < 0, -torch.inf)
        near, far = cosines(query, bank.features, Pairs(positive, negative, handed))
        margin_nce(near, far, 0.2).backward()
        assert query.grad is not None
        results.append((near.detach(), far.detach(), query.grad))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "clusters", "dim"), [(300, 7, 16), (129, 128, 24), (200, 131, 20)])
def test_rough_nearest_finds_the_nearest(size: int, clusters: int, dim: int) -> None:
    from interclr.kernels.nearest import rough_nearest

    generator = torch.Generator().manual_seed(5)
    features = torch.randn(size, dim, generator=generator).to(DEVICE)
    centroids = torch.randn(clusters, dim, generator=generator).to(DEVICE)
    found, exact = rough_nearest(features, centroids), nearest_centroid(features, centroids)

    def distance(label: Tensor) -> Tensor:
        return (features - centroids[label]).square().sum(1)

    torch.testing.assert_close(distance(found), distance(exact), rtol=2e-2, atol=0)  # TF32 on a GPU may swap equals


def test_kmeans_with_kernels_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    features = normalize(torch.randn(600, 16, generator=torch.Generator().manual_seed(6)), dim=1).to(DEVICE)
    objectives = []
    for wanted in ("1", "0"):
        monkeypatch.setenv("INTERCLR_KERNELS", wanted)
        history: list[float] = []
        kmeans(features, 12, 8, torch.Generator().manual_seed(7), history=history)
        assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(history))
        objectives.append(history[-1])
    assert objectives[0] == pytest.approx(objectives[1], rel=0.02)


def test_kernels_are_left_alone_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not kernels.usable(torch.zeros(1))
    assert kernels.usable(torch.zeros(1, device=DEVICE)) == (DEVICE.type == "cuda")
    monkeypatch.setenv("INTERCLR_KERNELS", "0")
    assert not kernels.usable(torch.zeros(1, device=DEVICE))


@pytest.mark.parametrize("order", ["random", "best first", "best last", "all equal"])
def test_the_guessed_bound_never_matters(order: str) -> None:
    """A sample that misleads: the bound is then too high or too low, and whole rows are gone over instead."""
    from interclr.kernels.select import select_pool

    score = torch.randn(2, 12_000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    if order == "all equal":
        score = torch.full_like(score, 0.3)
    elif order != "random":
        score = score.sort(1, descending=order == "best first").values
    label = torch.randint(7, (12_000,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    chosen = torch.arange(12_000, device=DEVICE)
    sampler = SemiHard(1_000, 0.1, candidates=12_000)
    own = torch.tensor([3, 99], device=DEVICE)
    index, cosine = sampler._select_plain(score, own, label, chosen)
    fast = select_pool(score.clone(), label.int(), own.int(), chosen, 1_000, sampler._fraction())
    assert torch.equal(fast[0], index)
    assert torch.equal(fast[1], cosine)


def test_there_is_nearly_always_room_above_the_bound() -> None:
    """What decides the kernel's speed: how often the bound lies above the pool's border or leaves too much above it."""
    from interclr.kernels.select import BLOCK, DEVIATIONS, SAMPLE, room_to_keep

    torch.manual_seed(0)
    rows, share = 3_000, 0.1
    for columns in (10_752, 172_032):
        sample = min(SAMPLE, BLOCK)
        guess = int(share * sample + DEVIATIONS * (share * sample) ** 0.5 + 2)
        # The share of a whole row above its guess-th best of a sample: a Beta variable.
        above = torch.distributions.Beta(float(guess), float(sample + 1 - guess)).sample((rows,))
        kept = above * columns
        fallbacks = (kept < share * columns) | (kept > room_to_keep(columns, sample, share))
        assert int(fallbacks.sum()) <= 3, f"{int(fallbacks.sum())} of {rows} rows"


def plain_norm(x: Tensor, parts: int, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm of (R, C) in float64, with mean and variance of each part."""
    each = x.double().view(parts, -1, x.shape[1])
    mean, variance = each.mean(1, keepdim=True), each.var(1, keepdim=True, correction=0)
    value = (each - mean) / (variance + 1e-5).sqrt() * weight + bias
    return value.flatten(0, 1), mean.squeeze(1), variance.squeeze(1)


def running_after(before: Tensor, each: Tensor, views: int) -> Tensor:
    """Running statistics behind the views, of (parts, C) the views' own."""
    value = before.double()
    for own in each.chunk(views):
        value = value.lerp(own.mean(0), 0.1)
    return value


@pytest.mark.parametrize(
    ("images", "height", "width", "channels", "parts", "views"),
    [(2, 1, 3, 3, 1, 1), (8, 8, 8, 64, 4, 2), (20, 5, 7, 40, 2, 2)],
)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("skip", ["none", "plain", "normalised"])
@pytest.mark.parametrize("uses", ["one", "two", "quarter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_its_gradient(
    images: int, height: int, width: int, channels: int, parts: int, views: int, relu: bool, skip: str, uses: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    from interclr.kernels.norm import Norm, moments, normalise, normalise_backward

    if uses == "quarter" and skip == "none":
        pytest.skip("a quarter is only taken behind a residual")
    rows = images * height * width
    generator = torch.Generator().manual_seed(rows + channels)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def layer() -> Norm:
        weight, bias = 1 + 0.3 * numbers(channels), 0.3 * numbers(channels)
        return Norm(weight, bias, numbers(channels), numbers(channels).abs(), torch.tensor(7, device=DEVICE), 0.1, 1e-5)

    norm, its = layer(), layer() if skip == "normalised" else None
    x = (numbers(rows, channels) + 30 * numbers(channels)).to(dtype)  # means far from 0: sums of squares would cancel
    residual = numbers(rows, channels).to(dtype) if skip != "none" else None
    running = [[layer.running_mean.clone(), layer.running_var.clone()] for layer in (norm, its) if layer is not None]
    size = (height, width) if uses == "quarter" else None

    found = moments(x, parts)
    its_found = moments(residual, parts) if residual is not None and its is not None else None
    both = (its_found, its) if its_found is not None and its is not None else None
    output, quarter = normalise(x, found, norm, views, residual, both, relu, size)

    leaves = [x.double().requires_grad_(), *(value.double().requires_grad_() for value in norm[:2])]
    linear, mean, variance = plain_norm(leaves[0], parts, *leaves[1:])
    kept = [(norm, mean, variance)]
    if residual is not None:
        leaves.append(residual.double().requires_grad_())
        other = leaves[-1]
        if its is not None:
            leaves += [value.double().requires_grad_() for value in its[:2]]
            other, *its_own = plain_norm(leaves[3], parts, *leaves[4:])
            kept.append((its, *its_own))
        linear = linear + other
    expected = (linear.relu() if relu else linear).detach()
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(output.double(), expected, **loose)
    torch.testing.assert_close(found.mean.double(), mean.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance.double(), variance.detach(), rtol=1e-4, atol=1e-4)
    if quarter is not None:
        seen = output.view(images, height, width, channels)[:, ::2, ::2].reshape(-1, channels)
        assert torch.equal(quarter, seen)
    each = rows // parts
    for before, (own, own_mean, own_variance) in zip(running, kept, strict=True):
        assert own.batches.item() == 7 + views
        unbiased = own_variance.detach() * each / (each - 1)
        for got, old, new in zip(own[2:4], before, (own_mean.detach(), unbiased), strict=True):
            torch.testing.assert_close(got.double(), running_after(old, new, views), rtol=1e-4, atol=1e-4)

    # Backward. The same values pass the ReLU as did forward, where rounding decides what is above 0.
    first = numbers(rows, channels).to(dtype)
    second = None if uses == "one" else numbers(rows if quarter is None else len(quarter), channels).to(dtype)
    total = first.double()
    if quarter is not None:
        total.view(images, height, width, channels)[:, ::2, ::2] += second.double().view(
            images, (height + 1) // 2, (width + 1) // 2, channels
        )
    elif second is not None:
        total = total + second.double()
    total = total * ((output > 0) if relu else torch.ones_like(output, dtype=torch.bool))
    got = normalise_backward(first, second, x, output if skip != "none" else None, found, norm, relu, size)
    assert (got.residual is not None) == (skip != "none")
    if got.residual is not None:
        torch.testing.assert_close(got.residual.double(), total, rtol=2**-7, atol=1e-6)
        total = got.residual.double()  # rounded: what BatchNorm's gradient is worked out from
    linear.backward(total)
    torch.testing.assert_close(got.input.double(), leaves[0].grad, **loose)
    torch.testing.assert_close(got.weight.double(), leaves[1].grad, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got.bias.double(), leaves[2].grad, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rows", [1, 31, 128, 129, 641, 1793])
def test_moments_do_not_cancel(rows: int) -> None:
    """Whatever the number of rows: means a thousand times the spread, and channels that are constant."""
    from interclr.kernels.norm import moments

    generator = torch.Generator().manual_seed(rows)
    level = torch.linspace(1, 300, 64)
    for spread, allowed in ((level / 1000, 1e-4), (torch.zeros(64), 0.0)):
        x = (level + spread * torch.randn(2 * rows, 64, generator=generator)).to(DEVICE)
        mean, variance = moments(x, parts=2)
        parts = x.double().view(2, rows, 64)
        torch.testing.assert_close(mean.double(), parts.mean(1), rtol=1e-6, atol=1e-6)
        assert (variance >= 0).all()
        error = (variance.double() - parts.var(1, correction=0)).abs()
        assert (error <= allowed * spread.to(DEVICE) ** 2 + 1e-12 * level.to(DEVICE) ** 2).all()


def test_norm_lets_nan_through() -> None:
    """A run that has diverged must not look well."""
    from interclr.kernels.norm import Norm, moments, normalise

    x = torch.randn(64, 4, device=DEVICE)
    x[5, 2] = float("nan")
    ones, zeros = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    norm = Norm(ones, zeros, zeros.clone(), ones.clone(), torch.tensor(0, device=DEVICE), 0.1, 1e-5)
    output, _ = normalise(x, moments(x, 1), norm, 1, relu=True)
    assert output[:, 2].isnan().all()
    assert not output[:, [0, 1, 3]].isnan().any()


@pytest.mark.parametrize(("count", "height", "width", "channels", "stride"), [(3, 7, 9, 8, 1), (4, 16, 16, 64, 2)])
def test_the_small_stem_is_a_convolution(count: int, height: int, width: int, channels: int, stride: int) -> None:
    from interclr.kernels.stem import convolve, weight_gradient

    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(count, 3, height, width, generator=generator),
        torch.randn(channels, 3, 3, 3, generator=generator),
    )
    x, weight = (t.to(DEVICE, HALF).contiguous(memory_format=torch.channels_last) for t in (x, weight))
    exact = weight.double().requires_grad_()
    expected = torch.nn.functional.conv2d(x.double(), exact, stride=stride, padding=1)
    output, found = convolve(x, weight, stride, parts=2)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=2e-2, atol=2e-2)
    assert (found is None) == (count == 3)  # tiles would lie across parts
    if found is not None:
        each = output.double().permute(0, 2, 3, 1).reshape(2, -1, channels)
        torch.testing.assert_close(found.mean.double(), each.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.variance.double(), each.var(1, correction=0), rtol=1e-5, atol=1e-5)
    gradient = torch.randn(expected.shape, generator=generator).to(DEVICE, HALF)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    expected.backward(gradient.double())
    torch.testing.assert_close(weight_gradient(x, gradient, stride).double(), exact.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 700), (3, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("margin", [-0.5, 0.0])
def test_margin_nce_is_the_plain_one(
    rows: int, width: int, dtype: torch.dtype, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with absent negatives (−inf), and an anchor that has none at all, whose loss is 0."""
    generator = torch.Generator().manual_seed(width)
    positive = (2 * torch.rand(rows, generator=generator) - 1).to(DEVICE)
    negative = (2 * torch.rand(rows, width, generator=generator) - 1).to(DEVICE, dtype)
    if width > 1:
        negative[:, ::3] = float("-inf")
        negative[0] = float("-inf")
    results = {}
    for kernel in ("1", "0"):
        monkeypatch.setenv("INTERCLR_KERNELS", kernel)
        a, b = positive.clone().requires_grad_(), negative.clone().requires_grad_()
        loss = margin_nce(a, b, 0.1, margin, reduction="none")
        loss.backward(torch.arange(1.0, rows + 1, device=DEVICE))
        results[kernel] = (loss.detach(), a.grad, b.grad)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    for fast, plain in zip(results["1"], results["0"], strict=True):
        assert fast is not None
        assert plain is not None
        assert fast.dtype == plain.dtype
        torch.testing.assert_close(fast, plain, rtol=2 * rounding, atol=rounding)
    if width > 1:
        assert results["1"][0][0] == 0
        assert not results["1"][2][0].any()  # type: ignore[index]


def test_the_variance_survives_an_outlier_in_the_first_row() -> None:
    from interclr.kernels.norm import moments

    x = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[0] = 1000.0
    torch.testing.assert_close(moments(x, 1).variance[0].double(), x.double().var(0, correction=0), rtol=1e-4, atol=0)


CIFAR = {"jitter": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "grey": 0.2}


@pytest.mark.parametrize(
    ("kind", "canvas", "output"),
    [
        (CIFAR, (32, 32), 32),
        (CIFAR | {"blur": 0.5}, (32, 32), 32),
        (CIFAR | {"blur": 0.5, "solarise": 0.5}, (12, 17), 24),  # not a power of two; a wider canvas than high
        (CIFAR | {"blur": 1.0, "blur_kernel": 9}, (8, 8), 8),  # so wide that it sees both borders
        (CIFAR | {"solarise": 1.0, "jitter": 1.0}, (9, 9), 9),
        ({"jitter": 1.0, "hue": 0.5}, (16, 16), 16),
        ({"jitter": 1.0, "contrast": 0.9}, (16, 16), 16),
        ({"jitter": 0.5, "saturation": 1.5, "hue": 0.2}, (16, 16), 16),
        ({"grey": 0.5, "flip": 1.0}, (16, 16), 16),
        ({"blur": 0.5}, (3, 5), 64),
        ({"crop_scale": (0.05, 0.1), "flip": 0.0}, (16, 16), 16),
    ],
)
@pytest.mark.parametrize("kinds", [1, 2])
def test_views_of_small_images_are_the_plain_ones(
    kind: dict[str, float], canvas: tuple[int, int], output: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"crop_scale": (0.5, 1.0)} if kinds == 2 else {}
    views = Views([View(**kind), View(**kind | other)], output, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))  # type: ignore[arg-type]
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (6, 3, *canvas), dtype=torch.uint8, device=DEVICE)
    pixels[0] = 7  # no colour, no contrast
    low = torch.tensor([2, 2], device=DEVICE)
    size = torch.maximum((torch.rand(6, 2, device=DEVICE) * torch.tensor(canvas, device=DEVICE)).long() + 1, low)
    for sizes in (None, size):
        images = Images(torch.arange(6, device=DEVICE), pixels, sizes, None)
        made = []
        for use in ("0", "1"):
            monkeypatch.setenv("INTERCLR_KERNELS", use)
            assert views._are_small(pixels) == (use == "1")
            generator = torch.Generator(DEVICE).manual_seed(3)
            made.append(views(images, generator).views)
        for plain, fast in zip(*made, strict=True):
            assert fast.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(fast, plain, atol=1e-4, rtol=0)  # 1e-4: 1/200 of a grey level


@pytest.mark.parametrize(
    "kind",
    [
        CIFAR | {"blur": 0.5, "solarise": 0.2},
        {"crop_scale": (0.9, 1.0), "crop_ratio": (1.9, 2.0), "flip": 0.2},  # hardly ever fits
        {"crop_scale": (0.25, 0.25), "crop_ratio": (1.0, 1.0)},  # halves of odd sizes: rounded to even
        {"crop_scale": (1.0, 1.0), "crop_ratio": (1.5, 1.5)},
        {"jitter": 0.5, "contrast": 1.5, "hue": 0.1, "grey": 1.0},
    ],
)
def test_parameters_of_small_views_are_the_plain_ones(kind: dict[str, float]) -> None:
    from interclr.kernels.views import Kind, parameters

    view = View(**kind)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    size = torch.randint(1, 65, (1_500, 2), generator=generator).to(DEVICE)
    uniforms = torch.rand((3_000, UNIFORMS), generator=generator).to(DEVICE)
    uniforms[:40] = 0  # keys that are equal
    strengths = (view.brightness, view.contrast, view.saturation)
    ours = Kind(
        view.crop_scale, view.crop_ratio, view.flip, view.jitter, strengths, view.hue, view.grey, view.blur,
        view.blur_sigma, 3, view.solarise,
    )  # fmt: skip
    table = parameters(size, uniforms, ATTEMPTS, ours)
    plain = parameters_from_uniforms(view, uniforms, size.repeat(2, 1))
    window = torch.stack((plain.top, plain.left, plain.height, plain.width, plain.flip.long()), 1)
    assert torch.equal(table[:, :5].long(), window)
    none = torch.zeros(len(uniforms), device=DEVICE)
    colours = [(8, plain.hue), (13, plain.grey), (14, plain.blur_sigma), (15, plain.solarise)]
    for column, values in colours:
        torch.testing.assert_close(table[:, column], none if values is None else values.float(), rtol=1e-6, atol=1e-7)
    if plain.factor is not None and plain.order is not None:
        torch.testing.assert_close(table[:, 5:8], plain.factor, rtol=1e-6, atol=0)
        assert torch.equal(table[40:, 9:13].long(), plain.order[40:])
        used = sum(strength > 0 for strength in (*strengths, view.hue))
        first = table[:40, 9 : 9 + used].long()  # any order of equal keys will do, but each is there once
        assert torch.equal(first.sort(1).values, plain.order[:40, :used].sort(1).values)


def test_views_that_shrink_or_are_large_take_the_plain_way() -> None:
    pixels = torch.zeros(1, 3, 40, 40, dtype=torch.uint8, device=DEVICE)
    for output, small in ((40, True), (39, False), (64, True), (65, False)):
        assert Views([View()], output, (0.5,) * 3, (0.2,) * 3)._are_small(pixels) == small
    assert not Views([View()], 40, (0.5,) * 3, (0.2,) * 3)._are_small(pixels.float())
    for kernel, small in ((9, True), (11, False)):
        views = Views([View(), View(blur=0.5, blur_kernel=kernel)], 64, (0.5,) * 3, (0.2,) * 3)
        assert views._are_small(pixels) == small
    assert Views([View(blur_kernel=11)], 64, (0.5,) * 3, (0.2,) * 3)._are_small(pixels)  # never blurs
