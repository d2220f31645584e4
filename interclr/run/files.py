"""Files that are written whole or not at all, and tensors that are read without running code."""

from __future__ import annotations

import contextlib
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from interclr.types import UserError

ARCHIVE = ("inline_container", "PytorchStreamWriter")  # in what torch says where it cannot write


def check_writable(folder: Path, advice: str = "choose another --out") -> None:
    """Make the folder and write to it, before anything long starts: an error where the result could not be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{os.getpid()}"  # every rank tries
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}; {advice}") from error


@contextlib.contextmanager
def replacing(path: Path, advice: str = "make room or permission and repeat the command") -> Iterator[Path]:
    """A path beside ``path`` to write to. It takes its place, synced, at the end; nothing is left if that fails."""
    before = sys.exception()  # one that is being handled already is not the cause of what goes wrong here
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = _reason(error, before)
        if reason is None:
            raise
        raise UserError(f"could not write {path}: {reason}; {advice}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _reason(error: Exception, before: BaseException | None) -> str | None:
    """Why it could not be written; None for an error of another kind.

    torch reports a full disk as a RuntimeError about its archive, behind which there may be the system's own words.
    """
    found: BaseException | None = error
    while found is not None and found is not before:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__context__
    of_writing = isinstance(error, OSError | SafetensorError) or any(word in str(error) for word in ARCHIVE)
    return " ".join(str(error).split())[:200] if of_writing else None


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """As safetensors, readable as far as the user's mask has it: safetensors itself makes files for the owner alone."""
    state = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with replacing(path) as temporary:
        save_file(state, temporary, metadata)
        mask = os.umask(0)
        os.umask(mask)
        with contextlib.suppress(OSError):  # some network file systems know no modes
            temporary.chmod(0o666 & ~mask)


def save_state(path: Path, state: Mapping[str, Any], advice: str = "make room or permission, then continue") -> None:
    """Tensors and plain values, to be read by ``load_state``."""
    with replacing(path, advice) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)


def load_state(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Tensors and plain values only: a file never runs code. Checksums are compared, which torch does not do."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state
