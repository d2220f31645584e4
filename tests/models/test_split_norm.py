from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from interclr.models import BackboneConfig, SplitBatchNorm, split_batch_norm, takes_views_together
from interclr.types import UserError


def norm_and_input(dimensions: int, rows: int) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, 6) if dimensions == 1 else (rows, 6, 3, 3)
    norm = nn.BatchNorm1d(6) if dimensions == 1 else nn.BatchNorm2d(6)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(6, generator=generator))
        norm.bias.copy_(torch.randn(6, generator=generator))
        norm.running_mean.copy_(torch.randn(6, generator=generator))
    return norm, torch.randn(shape, generator=generator) * 3 + 1


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize(("rows", "splits", "sizes"), [(16, 4, [4] * 4), (12, 2, [6, 6]), (10, 4, [3, 3, 2, 2])])
def test_training_is_batch_norm_on_each_part_alone(dimensions: int, rows: int, splits: int, sizes: list[int]) -> None:
    norm, x = norm_and_input(dimensions, rows)
    split = SplitBatchNorm(copy.deepcopy(norm), splits)
    own = x.clone().requires_grad_()
    output = split(own)
    parts, expected = [copy.deepcopy(norm) for _ in sizes], []
    theirs = x.clone().requires_grad_()
    for part, piece in zip(parts, theirs.split(sizes), strict=True):
        expected.append(part(piece))
    torch.testing.assert_close(output, torch.cat(expected))
    torch.testing.assert_close(split.running_mean, torch.stack([p.running_mean for p in parts]).mean(0))
    torch.testing.assert_close(split.running_var, torch.stack([p.running_var for p in parts]).mean(0))
    assert split.num_batches_tracked == 1
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    (output * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_no_part_is_left_with_one_image() -> None:
    """BatchNorm over one value per channel cannot be trained: sizes of parts differ by one at most."""
    for rows in range(8, 40):
        SplitBatchNorm(nn.BatchNorm1d(3), 4)(torch.randn(rows, 3))


def test_a_batch_too_small_to_split_is_normalised_whole() -> None:
    norm, x = norm_and_input(1, 7)
    torch.testing.assert_close(SplitBatchNorm(copy.deepcopy(norm), 4)(x), norm(x))


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_eval_is_batch_norm(rows: int) -> None:
    norm, x = norm_and_input(2, rows)
    split = SplitBatchNorm(norm, 4).eval()
    assert torch.equal(split(x), norm.eval()(x))


def test_replacing_keeps_the_state_dict_and_the_function() -> None:
    backbone = BackboneConfig(backbone="resnet10", width=8, stem="strided").build()
    images = torch.randn(8, 3, 32, 32)
    split = split_batch_norm(copy.deepcopy(backbone), 4)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in split.modules())
    assert list(split.state_dict()) == list(backbone.state_dict())
    split.load_state_dict(backbone.state_dict())
    assert torch.equal(split.eval()(images), backbone.eval()(images))
    assert not torch.allclose(split.train()(images), backbone.train()(images))
    untouched = split_batch_norm(copy.deepcopy(backbone), 1)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in untouched.modules()) > 0


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize(("rows", "splits"), [(8, 1), (8, 4), (6, 4), (10, 4)])
@pytest.mark.parametrize("compiled", [False, True])
def test_two_views_in_one_batch_are_two_batches(dimensions: int, rows: int, splits: int, compiled: bool) -> None:
    torch._dynamo.reset()
    norm, first = norm_and_input(dimensions, rows)
    second = first.flip(0) * 2 - 3
    together, apart = SplitBatchNorm(copy.deepcopy(norm), splits, 2), SplitBatchNorm(copy.deepcopy(norm), splits)
    forward = torch.compile(together, backend="aot_eager", fullgraph=True) if compiled else together
    inputs = [torch.cat([first, second]).requires_grad_(), torch.cat([first, second]).requires_grad_()]
    for _ in range(2):
        outputs = [forward(inputs[0]), torch.cat([apart(view) for view in inputs[1].chunk(2)])]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0))
        for output in outputs:
            (output * weights).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-3, atol=2e-4)  # two values: a small variance
    for name, value in apart.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], value, msg=name)
    torch.testing.assert_close(together.weight.grad, apart.weight.grad, rtol=1e-4, atol=1e-4)


def test_a_batch_norm_that_does_more_is_refused() -> None:
    class Activated(nn.BatchNorm2d):
        pass

    with pytest.raises(UserError, match="key_splits=1"):
        split_batch_norm(nn.Sequential(Activated(3)), 4)
    assert not takes_views_together(nn.Sequential(Activated(3)))
    assert takes_views_together(nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3)))


def test_a_batch_norm_that_averages_all_batches_is_refused() -> None:
    """Its running statistics are not a moving average: silently taking one would change the network."""
    network = nn.Sequential(nn.BatchNorm2d(3, momentum=None))
    assert not takes_views_together(network)
    with pytest.raises(UserError, match="momentum=None"):
        split_batch_norm(network, 2)


def test_a_norm_without_scale_and_shift_compiles() -> None:
    """SimSiam's projector ends in one."""
    torch._dynamo.reset()  # earlier tests have compiled this very function for other shapes
    norm = nn.BatchNorm1d(6, affine=False)
    together, apart = SplitBatchNorm(copy.deepcopy(norm), 1, 2), copy.deepcopy(norm)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    output = torch.compile(together, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(output, torch.cat([apart(view) for view in x.chunk(2)]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.running_var, apart.running_var)
