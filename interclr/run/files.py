"""Files that are written whole or not at all, and tensors that are read without running code."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from interclr.types import UserError


@contextlib.contextmanager
def replacing(path: Path, advice: str = "make room or permission and repeat the command") -> Iterator[Path]:
    """A path beside ``path`` to write to. It takes its place, synced, at the end; nothing is left if that fails.

    Errors are taken to be of the writing: nothing else belongs in the block.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise UserError(f"could not write {path}: {_cause(error)}; {advice}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _cause(error: BaseException) -> str:
    """Behind torch's complaint about its archive there is the system's, such as that no space is left."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    if isinstance(found, OSError) and found.strerror:
        return found.strerror
    return " ".join(str(error).split())[:200]


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """As safetensors, readable as far as the user's mask has it: safetensors itself makes files for the owner alone."""
    with replacing(path) as temporary:
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, temporary, metadata)
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
