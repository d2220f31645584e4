"""Files that are whole or not there, whatever goes wrong while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from interclr.run import files
from interclr.run.files import load_state, replacing, save_state, save_tensors, write_text
from interclr.types import UserError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_write(path: Path, error: BaseException) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half")
        raise error


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "before")
    with pytest.raises(UserError, match=r"could not write .*file\.txt: No space left on device; make room"):
        half_write(path, FULL)
    with pytest.raises(KeyboardInterrupt):
        half_write(path, KeyboardInterrupt())
    assert path.read_text() == "before"
    assert [each.name for each in path.parent.iterdir()] == ["file.txt"]


def test_the_cause_behind_torchs_complaint_is_named(tmp_path: Path) -> None:
    complaint = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")
    complaint.__context__ = FULL
    with pytest.raises(UserError, match=r"could not write .*state\.pt: No space left on device; make room"):
        half_write(tmp_path / "state.pt", complaint)


def test_errors_that_are_not_of_writing_stay_what_they_are(tmp_path: Path) -> None:
    for error in (RuntimeError("CUDA error: device-side assert triggered"), ValueError("something else")):
        with pytest.raises(type(error), match=str(error)):
            half_write(tmp_path / "file", error)
    with pytest.raises(UserError, match=r"could not write .*: unexpected pos .inline_container\.cc.; make room"):
        half_write(tmp_path / "file", RuntimeError("unexpected pos [inline_container.cc]"))
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_being_handled_is_not_the_cause(tmp_path: Path) -> None:
    try:
        (tmp_path / "nowhere").read_text()
    except FileNotFoundError:
        with pytest.raises(RuntimeError, match=r"^shared memory$"):
            half_write(tmp_path / "file", RuntimeError("shared memory"))


def test_a_place_where_safetensors_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(UserError, match=r"could not write .*I/O error: No space left on device"):
        save_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(3)})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "file") as temporary:
            temporary.symlink_to("/dev/full")
            with open(temporary, "wb") as file:
                torch.save({"a": torch.zeros(100_000)}, file)

    with pytest.raises(UserError, match=r"could not write .*No space left on device"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_tensors_come_back_and_are_as_readable_as_other_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_tensors(tmp_path / "a.safetensors", {"a": torch.arange(6).view(2, 3).T}, {"told": "this"})
    finally:
        os.umask(before)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.arange(6).view(2, 3).T)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    values = torch.full((64,), 2.0)
    save_state(path, {"values": values, "step": 3})
    assert load_state(path)["step"] == 3
    whole = bytearray(path.read_bytes())
    whole[whole.index(values.numpy().tobytes()) + 7] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="is damaged"):
        load_state(path)
