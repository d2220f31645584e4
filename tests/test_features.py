"""Features of a whole set: joined at the end, or written to where they stay."""

from __future__ import annotations

import torch
from torch import nn

from interclr.features import embed_all
from interclr.types import Images


def batches(pixels: torch.Tensor) -> list[Images]:
    return [Images(torch.arange(len(part)), part) for part in pixels.split(5)]


def test_features_are_the_same_wherever_they_are_kept() -> None:
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 6))
    pixels = torch.randint(256, (23, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def transform(images: Images) -> torch.Tensor:
        return images.pixels.float() / 255

    joined = embed_all(network, batches(pixels), transform)
    told: list[int] = []
    kept = embed_all(network, batches(pixels), transform, progress=told.append, total=23, keep_on=torch.device("cpu"))
    assert torch.equal(kept, joined)
    assert kept.shape == (23, 6)
    assert told == [5, 10, 15, 20, 23]
    assert network.training
    network.eval()
    torch.testing.assert_close(kept, network(pixels.float() / 255).detach())


def test_fewer_images_than_said_leave_no_rows_of_nothing() -> None:
    pixels = torch.ones(7, 3, 2, 2, dtype=torch.uint8)
    found = embed_all(nn.Flatten(), batches(pixels), lambda images: images.pixels.float(), total=9)
    assert torch.equal(found, torch.ones(7, 12))
