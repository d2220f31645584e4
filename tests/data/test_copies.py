"""Near copies by tiny pictures, against every pair looked at."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from interclr.data import copies
from interclr.data.copies import MOST_COPIES, SAME_PICTURE, SIDE, near_copies, tiny


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    a, b = (picture.numpy().astype(float) for picture in (one, other))
    a, b = ((picture - picture.mean(axis=(1, 2), keepdims=True)).ravel() for picture in (a, b))
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if size else 0.0


def digests_of(pictures: torch.Tensor) -> list[bytes]:
    return [bytes(picture.flatten().tolist()) for picture in pictures]


@pytest.mark.parametrize("looked_at", [1, 10**9])  # pairs one by one, and all together
@pytest.mark.parametrize("coarse", [2, 4, 16])  # the energy in the coarse parts, in both, in the fine ones
@pytest.mark.parametrize("chunk", [2**24, 100])
def test_all_pairs_that_correlate_are_found(
    coarse: int, chunk: int, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(copies, "MOST_LOOKED_AT", looked_at)
    monkeypatch.setattr(copies, "PART", 7)
    generator = torch.Generator().manual_seed(coarse)
    kinds = torch.randint(0, 200, (6, 3, coarse, coarse), generator=generator)
    kinds = kinds.repeat_interleave(SIDE // coarse, 2).repeat_interleave(SIDE // coarse, 3)
    strength = torch.linspace(0.05, 0.4, 30).view(-1, 1, 1, 1)
    noise = torch.randint(-100, 100, (30, 3, SIDE, SIDE), generator=generator) * strength
    tints = torch.randint(0, 30, (30, 3, 1, 1), generator=generator)
    pictures = (kinds[torch.arange(30) % 6] + noise + tints).clamp(0, 255).to(torch.uint8)
    pictures[7] = pictures[1]
    pictures[8:10] = 9  # nothing to correlate
    own = [i for i in range(30) if i not in (7, 9)]  # the first of equal ones stands for them
    pairs = {pair: correlation(pictures[pair[0]], pictures[pair[1]]) for pair in itertools.combinations(own, 2)}
    wanted = {pair: value for pair, value in pairs.items() if value >= SAME_PICTURE}
    assert 5 <= len(wanted) < len(pairs) / 4
    found = near_copies(pictures, digests_of(pictures))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert list(found) == sorted(found, key=lambda pair: (-found[pair], pair))


@pytest.mark.parametrize("looked_at", [1, 500])
def test_of_many_copies_the_closest_are_kept(looked_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_LOOKED_AT", looked_at)
    generator = torch.Generator().manual_seed(0)
    scene = torch.randint(0, 200, (1, 3, SIDE, SIDE), generator=generator)
    frames = (scene + torch.randint(0, 9, (40, 3, SIDE, SIDE), generator=generator)).to(torch.uint8)
    found = near_copies(frames, digests_of(frames))
    first = sorted((correlation(frames[0], frames[i]), i) for i in range(1, 40))[-MOST_COPIES:]
    assert {other for one, other in found if one == 0} == {i for _, i in first}
    assert len(found) < 40 * MOST_COPIES


def test_a_resized_brighter_compressed_picture_is_a_near_copy_and_others_are_not(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    scenes = [Image.fromarray(random.integers(0, 200, (6, 6, 3), dtype=np.uint8)).resize((90, 70)) for _ in range(4)]
    brighter = Image.fromarray((np.asarray(scenes[2]) * 1.2).astype(np.uint8)).resize((64, 64))
    brighter.save(tmp_path / "copy.jpg", quality=60)
    pictures = [*(np.asarray(scene) for scene in scenes), np.array(Image.open(tmp_path / "copy.jpg"))]
    shrunk = torch.stack([tiny(torch.from_numpy(picture.copy()).permute(2, 0, 1)) for picture in pictures])
    assert list(near_copies(shrunk, digests_of(shrunk))) == [(2, 4)]


def test_few_pictures_have_no_copies() -> None:
    for count in (0, 1):
        assert near_copies(torch.zeros(count, 3, SIDE, SIDE, dtype=torch.uint8), [b"one"] * count) == {}
