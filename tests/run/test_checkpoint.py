from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from interclr.run import checkpoint
from interclr.types import UserError


def state(step: int, size: int = 64) -> checkpoint.State:
    return {"format": 1, "step": step, "learner": {"weight": torch.full((size,), float(step))}}


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_at_most(limit: int) -> Iterator[None]:
    """The operating system refuses to let a file grow further: as near to a full disk as a test gets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_save_load_and_keep(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "checkpoint"
    for step in (1, 2, 10, 900, 20_000):
        path = checkpoint.save(folder, step, state(step), keep=3)
        assert path.name == f"step-{step:010d}.pt"
    assert stored(folder) == ["step-0000000010.pt", "step-0000000900.pt", "step-0000020000.pt"]
    loaded, path, complaints = checkpoint.load_latest(folder)
    assert (loaded["step"], path.name, complaints) == (20_000, "step-0000020000.pt", [])
    assert torch.equal(loaded["learner"]["weight"], torch.full((64,), 20_000.0))
    checkpoint.save(folder, 20_000, state(20_000), keep=1)
    assert stored(folder) == ["step-0000020000.pt"]


def test_other_files_are_neither_read_nor_removed(tmp_path: Path) -> None:
    for name in ("step-1.pt", "step-0000000005.pt.bak", "notes.txt", "step-latest.pt"):
        (tmp_path / name).write_text("mine")
    assert checkpoint.find(tmp_path) == []
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.save(tmp_path, 1, state(1), keep=1)
    checkpoint.save(tmp_path, 2, state(2), keep=1)
    assert len(stored(tmp_path)) == 5
    assert checkpoint.load_latest(tmp_path / "nothing-here") is None


@pytest.mark.parametrize("failure", ["limit", "write", "save", "sync", "rename"])
def test_a_failed_write_leaves_the_old_one_and_nothing_else(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, state(1), keep=1)
    before = (tmp_path / "step-0000000001.pt").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(what: object, file: Any) -> None:
        file.write(b"half of it")
        raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed\nwriting file data/3")

    if failure == "limit":
        with files_at_most(100_000), pytest.raises(UserError) as caught:
            checkpoint.save(tmp_path, 2, state(2, size=1_000_000), keep=1)
    else:
        if failure == "save":
            monkeypatch.setattr(torch, "save", half)
        elif failure == "write":
            monkeypatch.setattr(torch, "save", full)
        else:
            monkeypatch.setattr(os, {"sync": "fsync", "rename": "replace"}[failure], full)
        with pytest.raises(UserError) as caught:
            checkpoint.save(tmp_path, 2, state(2), keep=1)
        monkeypatch.undo()
    message = str(caught.value)
    assert "\n" not in message
    assert "step-0000000002.pt" in message
    assert "--resume" in message
    assert stored(tmp_path) == ["step-0000000001.pt"]
    assert (tmp_path / "step-0000000001.pt").read_bytes() == before
    assert checkpoint.load_latest(tmp_path)[0]["step"] == 1


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(what: object, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, state(2), keep=1)
    assert stored(tmp_path) == []


def test_what_a_killed_process_left_is_not_a_checkpoint_and_goes(tmp_path: Path) -> None:
    (tmp_path / ".step-0000000009.pt.123.tmp").write_bytes(b"half")
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.save(tmp_path, 1, state(1), keep=2)
    assert stored(tmp_path) == ["step-0000000001.pt"]


def test_the_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoint"):
        with pytest.raises(UserError, match=r"could not write .*step-.*\.pt: .*earlier checkpoints are untouched"):
            checkpoint.save(folder, 1, state(1), keep=1)


def corruptions(whole: bytes) -> dict[str, bytes]:
    flipped = bytearray(whole)
    at = whole.index(torch.full((64,), 2.0).numpy().tobytes()) + 7
    flipped[at] ^= 0xFF
    return {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "tail lost": whole[:-40],
        "zeros": bytes(len(whole)),
        "text": b"not a checkpoint at all",
        "one byte of a tensor": bytes(flipped),
    }


@pytest.mark.parametrize("kind", ["empty", "truncated", "tail lost", "zeros", "text", "one byte of a tensor"])
def test_a_damaged_newest_is_passed_over_with_a_word(kind: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1), keep=3)
    newest = checkpoint.save(tmp_path, 2, state(2), keep=3)
    newest.write_bytes(corruptions(newest.read_bytes())[kind])
    loaded, path, complaints = checkpoint.load_latest(tmp_path)
    assert (loaded["step"], path.name) == (1, "step-0000000001.pt")
    assert len(complaints) == 1
    assert "step-0000000002.pt" in complaints[0]
    assert "\n" not in complaints[0]


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1), keep=3)
    newest = checkpoint.save(tmp_path, 2, state(2), keep=3)
    whole = newest.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for at in torch.randint(len(whole), (3,), generator=generator).tolist():
            damaged[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        newest.write_bytes(bytes(damaged))
        loaded, _, complaints = checkpoint.load_latest(tmp_path)
        assert (loaded["step"] == 1) == bool(complaints)


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), keep=3).write_bytes(b"gone")
    with pytest.raises(UserError) as caught:
        checkpoint.load_latest(tmp_path)
    assert "step-0000000001.pt" in str(caught.value)
    assert "step-0000000002.pt" in str(caught.value)
    assert "\n" not in str(caught.value)


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(Malicious.path),)

    path: Path


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_malicious_checkpoint_runs_no_code(form: str, tmp_path: Path) -> None:
    Malicious.path = tmp_path / "owned"
    checkpoint.save(tmp_path / "c", 1, state(1), keep=3)
    evil = tmp_path / "c" / "step-0000000002.pt"
    if form == "torch":
        torch.save(state(2) | {"extra": Malicious()}, evil)
    else:
        evil.write_bytes(pickle.dumps(Malicious()))
    loaded, _, complaints = checkpoint.load_latest(tmp_path / "c")
    assert loaded["step"] == 1
    assert len(complaints) == 1
    assert not Malicious.path.exists()


def test_a_file_of_somebody_else_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    torch.save([torch.zeros(3)], tmp_path / "step-0000000001.pt")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "step-0000000002.pt")
    with pytest.raises(UserError, match="not a checkpoint"):
        checkpoint.load_latest(tmp_path)
