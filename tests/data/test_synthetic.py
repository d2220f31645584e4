"""The synthetic set must be reproducible, balanced, and hard for anything that only looks at pixels or colours."""

import pytest
import torch
from torch import Tensor

from interclr.data.synthetic import CLASSES, generate


@pytest.fixture(scope="module")
def train() -> tuple[Tensor, Tensor]:
    return generate(2000, seed=0)


@pytest.fixture(scope="module")
def test() -> tuple[Tensor, Tensor]:
    return generate(500, seed=1)


def knn_accuracy(train: Tensor, train_label: Tensor, test: Tensor, test_label: Tensor, k: int = 20) -> float:
    """Cosine k-NN with votes weighted by exp(similarity / 0.1), on mean-centred features."""
    centre = train.mean(0)
    train, test = (torch.nn.functional.normalize(f - centre, dim=1) for f in (train, test))
    similarity, nearest = (test @ train.T).topk(k, dim=1)
    votes = torch.zeros(len(test), len(CLASSES)).scatter_add_(1, train_label[nearest], (similarity / 0.1).exp())
    return float((votes.argmax(1) == test_label).float().mean())


def test_shape_and_type(train: tuple[Tensor, Tensor]) -> None:
    pixels, labels = train
    assert pixels.shape == (2000, 3, 32, 32)
    assert pixels.dtype == torch.uint8
    assert labels.shape == (2000,)
    assert labels.dtype == torch.int64
    assert len(set(CLASSES)) == 10


@pytest.mark.parametrize("size", [8, 20, 48])
def test_other_sizes(size: int) -> None:
    pixels, _ = generate(3, seed=0, size=size)
    assert pixels.shape == (3, 3, size, size)
    assert pixels.float().std() > 10


def test_empty() -> None:
    pixels, labels = generate(0, seed=0)
    assert pixels.shape == (0, 3, 32, 32)
    assert labels.shape == (0,)


@pytest.mark.parametrize("arguments", [{"count": -1}, {"count": 1, "size": 4}, {"count": 1, "seed": -1}])
def test_bad_arguments(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="need count"):
        generate(**{"seed": 0, **arguments})


@pytest.mark.parametrize("count", [1, 7, 250, 251, 600])
def test_prefix_is_stable(train: tuple[Tensor, Tensor], count: int) -> None:
    pixels, labels = generate(count, seed=0)
    assert torch.equal(pixels, train[0][:count])
    assert torch.equal(labels, train[1][:count])


def test_independent_of_global_random_state(train: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    assert torch.equal(generate(250, seed=0)[0], train[0][:250])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seeds_and_chunks_differ(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
    assert not torch.equal(train[0][:250], test[0][:250])
    assert not torch.equal(train[0][:250], train[0][250:500])
    assert len(torch.cat([train[0], test[0]]).flatten(1).unique(dim=0)) == 2500


def test_balanced_and_shuffled(train: tuple[Tensor, Tensor]) -> None:
    labels = train[1]
    assert labels.bincount().tolist() == [200] * 10
    assert labels[:130].bincount().tolist() == [13] * 10
    assert not torch.equal(labels[:10], labels[10:20])


def test_colour_says_nothing_about_the_class(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
    """What colour jitter cannot remove must not help: neither an image's mean colour nor its hue finds the class."""

    def mean_colour(pixels: Tensor) -> Tensor:
        return pixels.float().mean((2, 3))

    def hue(pixels: Tensor) -> Tensor:
        colour = mean_colour(pixels)
        return colour - colour.mean(1, keepdim=True)

    for feature in (mean_colour, hue):
        assert knn_accuracy(feature(train[0]), train[1], feature(test[0]), test[1]) < 0.2


def test_pixels_say_little_about_the_class(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
    accuracy = knn_accuracy(train[0].float().flatten(1), train[1], test[0].float().flatten(1), test[1])
    assert accuracy < 0.3
