"""The convolutions for small images; ``interpreted.py`` says how these checks are run. Most need a Hopper GPU."""

from __future__ import annotations

import pytest
import small_conv_twin as twin
import torch
from torch import Tensor

from interclr.kernels import cuda, small_conv
from interclr.kernels.norm import Moments, Norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_hopper = pytest.mark.skipif(not small_conv.is_hopper(DEVICE), reason="needs a Hopper GPU")


@pytest.fixture(autouse=True)
def _whole_mantissas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def random(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)
    return values.contiguous(memory_format=torch.channels_last)


def assert_near(found: Tensor, wanted: Tensor, more: float = 2e-3) -> None:
    """Within bfloat16's rounding of each number, on the whole nearer. ``more`` for inputs rounded the other way."""
    distance, size = (found.double() - wanted.double()).abs(), wanted.double().abs()
    excess = distance - 2**-8 * size - more * wanted.double().std()
    assert float(excess.max()) <= 0
    assert float(distance.norm() / size.norm()) < 2**-9


@pytest.mark.skipif(not cuda.installed(), reason="needs cuda-bindings")
@pytest.mark.parametrize(("normed", "backward"), [(False, False), (True, False), (False, True)])
def test_the_kernels_compile(normed: bool, backward: bool) -> None:
    assert b"weight_gradient" in small_conv.machine_code(normed, backward)


@pytest.mark.skipif(not cuda.installed(), reason="needs cuda-bindings")
def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(RuntimeError, match="does not compile"):
        cuda.compile_for("sm_90a", "nonsense;")


@pytest.mark.parametrize(("parts", "groups"), [(1, 3), (2, 96), (4, 600)])
def test_moments_of_groups_become_those_of_parts(parts: int, groups: int) -> None:
    sizes = torch.tensor([171, 171, 170]).repeat(groups // 3)
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(int(n), 64, generator=generator) * 0.1 + 30 for n in sizes] for _ in range(parts)]
    means = torch.stack([torch.stack([group.mean(0) for group in part]) for part in rows])
    squares = torch.stack([torch.stack([(group - group.mean(0)).square().sum(0) for group in part]) for part in rows])
    spreads = torch.stack((means, squares)).to(DEVICE)
    mean, variance = torch.empty(2, parts, 64, device=DEVICE)
    few, together = small_conv.FEW, small_conv.TOGETHER
    small_conv._combine[(64 // few, parts)](spreads, mean, variance, groups, 64, together, few)
    wanted = [torch.cat(part).double() for part in rows]
    torch.testing.assert_close(mean.cpu(), torch.stack([w.mean(0) for w in wanted]).float(), rtol=1e-5, atol=0)
    expected = torch.stack([w.var(0, unbiased=False) for w in wanted]).float()
    torch.testing.assert_close(variance.cpu(), expected, rtol=1e-3, atol=0)


@on_hopper
@pytest.mark.parametrize(("images", "parts"), [(1, 1), (6, 2), (80, 4), (120, 1), (333, 3), (512, 8)])
@pytest.mark.parametrize("normed", [False, True])
def test_a_convolution_is_the_plain_one(images: int, parts: int, normed: bool) -> None:
    x, weight = random(images, 64, 32, 32), random(64, 64, 3, 3, seed=1)
    lines = torch.randn(parts, 2, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE) if normed else None
    y, found = small_conv.convolve(x, weight, parts, lines)
    wanted, _ = twin.convolve(twin.normalised(x, lines).float(), weight.float(), parts)
    assert_near(y, wanted, more=1e-2 if normed else 2e-3)
    rows = y.double().unflatten(0, (parts, -1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found.mean.double(), rows.mean(2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance.double(), rows.var(2, unbiased=False), rtol=1e-4, atol=1e-6)
    again, moments = small_conv.convolve(x, weight, parts, lines)
    assert torch.equal(again, y)
    assert torch.equal(moments.variance, found.variance)


@on_hopper
@pytest.mark.parametrize(("images", "parts"), [(1, 1), (6, 2), (20, 4), (35, 5), (50, 1), (66, 2), (84, 2), (300, 3)])
def test_gradients_are_the_plain_ones(images: int, parts: int) -> None:
    """So many images that a block of threads has 1, 2, 3 and more tiles, also one fewer than the others."""
    x, weight = random(images, 64, 32, 32), random(64, 64, 3, 3, seed=1)
    gradient = random(images, 64, 32, 32, seed=2)
    assert_near(small_conv.input_gradient(gradient, weight), twin.input_gradient(gradient.float(), weight.float()))
    lines = torch.randn(parts, 2, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for line in (None, lines):
        found = small_conv.weight_gradient(x, gradient, line)
        wanted = twin.weight_gradient(twin.normalised(x, line).float(), gradient.float())
        assert (found - wanted).norm() < 1e-4 * wanted.norm()
        assert torch.equal(found, small_conv.weight_gradient(x, gradient, line))


@on_hopper
def test_what_is_in_one_image_stays_there() -> None:
    """Tiles take turns in the same memory, and rows of images lie next to each other in it."""
    x, weight = random(700, 64, 32, 32), random(64, 64, 3, 3, seed=1)
    clean, _ = small_conv.convolve(x, weight, 1)
    x[0], x[350] = float("nan"), float("inf")
    y, _ = small_conv.convolve(x, weight, 1)
    others = [i for i in range(700) if i not in (0, 350)]
    assert torch.equal(y[others], clean[others])
    assert bool(y[0].isnan().all())


@on_hopper
def test_the_kernels_are_used_where_they_fit_and_nowhere_else() -> None:
    x, weight = random(2, 64, 32, 32), random(64, 64, 3, 3)
    rest = ((1, 1), (1, 1), (1, 1), 1)
    assert small_conv.fits(x, weight, *rest)
    assert not small_conv.fits(x.half(), weight.half(), *rest)
    assert not small_conv.fits(x.contiguous(), weight, *rest)
    assert not small_conv.fits(x, weight, (2, 2), *rest[1:])
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(2, 32, 32, 64).permute(0, 3, 1, 2)
    assert not small_conv.fits(shifted, weight, *rest)


def test_images_that_are_not_equal_parts_are_refused() -> None:
    with pytest.raises(AssertionError, match="5 images are not 2 equal parts"):
        small_conv.convolve(random(5, 64, 32, 32), random(64, 64, 3, 3), 2)


def test_without_a_compiler_the_library_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(small_conv, "is_hopper", lambda device: True)
    monkeypatch.setattr(small_conv, "_kernel", fails)
    small_conv._works.cache_clear()
    with pytest.warns(UserWarning, match="left to cuDNN.*no compiler here"):
        assert not small_conv.fits(random(2, 64, 32, 32), random(64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    small_conv._works.cache_clear()


@pytest.mark.parametrize(("parts", "views", "channels"), [(1, 1, 64), (4, 2, 8)])
def test_lines_are_batch_norm_and_running_statistics_follow(parts: int, views: int, channels: int) -> None:
    torch.manual_seed(0)
    plain = torch.nn.BatchNorm1d(channels).double()
    torch.nn.init.uniform_(plain.weight, 0.5, 1.5)
    torch.nn.init.uniform_(plain.bias, -1, 1)
    x = torch.randn(parts * 10, channels, dtype=torch.float64) * 3 + 1
    rows = x.unflatten(0, (parts, 10))
    found = Moments(rows.mean(1).float().to(DEVICE), rows.var(1, unbiased=False).float().to(DEVICE))
    state = [
        t.detach().clone().float().to(DEVICE) for t in (plain.weight, plain.bias, plain.running_mean, plain.running_var)
    ]  # type: ignore[union-attr]
    batches = torch.zeros((), dtype=torch.long, device=DEVICE)
    lines = small_conv.lines(found, Norm(*state, batches, 0.1, plain.eps), views, len(x)).cpu().double()
    for part, values in enumerate(rows):
        torch.testing.assert_close(
            values * lines[part, 0] + lines[part, 1], plain(values).detach(), rtol=1e-4, atol=1e-4
        )
    mean, variance = torch.zeros(channels).double(), torch.ones(channels).double()
    for view in rows.unflatten(0, (views, -1)):
        mean += 0.1 * (view.mean(1).mean(0) - mean)
        variance += 0.1 * (view.var(1).mean(0) - variance)
    torch.testing.assert_close(state[2].cpu().double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[3].cpu().double(), variance, rtol=1e-4, atol=1e-5)
    assert int(batches) == views
