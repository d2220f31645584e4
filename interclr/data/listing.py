"""All images below a folder, in an order that never changes: a million files in seconds, and cached afterwards.

The cache is checked against the modification times of the directories alone: a file added, removed or renamed changes
its directory's time, and there are a thousand times fewer directories than files.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interclr.data.names import Names
from interclr.types import UserError

EXTENSIONS = ("jpg", "jpeg", "png", "bmp", "webp", "tif", "tiff", "ppm", "gif", "jfif")
CACHE_VERSION = 4
SETTLED_NANOSECONDS = 2_000_000_000
LONGEST_EXTENSION = 8
NOT_REGULAR = "not a regular file"  # a kind too long for an extension: pipes, sockets, devices

_extensions = frozenset(EXTENSIONS)
_digits = re.compile("[0-9]+")


@dataclass(frozen=True)
class Listing:
    images: Names  # relative paths with '/', depth first, a directory's own files before its subdirectories
    # Other files that can be seen, by extension: in small letters, '' where there is none; or ``NOT_REGULAR``.
    kinds: dict[str, int]
    hidden: int  # files whose name begins with a dot
    directories: Names  # relative paths, '' for the root
    changed: NDArray[np.int64]  # each directory's modification time in nanoseconds

    @property
    def other(self) -> int:
        """All files that are not listed as images."""
        return sum(self.kinds.values()) + self.hidden


def list_images(folder: Path) -> Listing:
    """List ``folder``, from the cache where nothing has changed since."""
    root = folder.resolve()
    cache = cache_folder() / f"listing-{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}.npz"
    cached = _load(cache, root)
    if cached is not None:
        return cached
    started = time.time_ns()
    listing = scan(root)
    # A directory that changed a moment ago may change again within the same tick of the file system's clock, and the
    # cache would not notice. Such a listing is not kept.
    if int(listing.changed.max()) < started - SETTLED_NANOSECONDS:
        _save(cache, listing)
    return listing


def scan(root: Path) -> Listing:
    """Walk the tree. Every directory is visited once, so links to directories are followed and cycles end.

    One that lies in the tree itself counts under its own path, whatever links there are to it: names give labels.
    """
    listing, own, links = _walk(root, None)
    return _walk(root, own)[0] if links else listing


Identity = tuple[int, int]  # of a directory: device and number


def _walk(root: Path, own: set[Identity] | None) -> tuple[Listing, set[Identity], bool]:
    """What there is, directories visited, and whether there are links to some.

    They are followed where ``own``, the directories of the tree itself, are known, unless they lead to one of those.
    """
    links = False
    chunks: list[str] = []
    directories: list[str] = []
    changed: list[int] = []
    seen: set[Identity] = set()
    kinds: dict[str, int] = {}
    hidden = 0
    waiting = [("", False)]  # and whether it is a link
    while waiting:
        directory, linked = waiting.pop()
        path = os.path.join(root, directory) if directory else str(root)
        files: list[str] = []
        folders: list[tuple[str, bool]] = []
        try:
            status = os.stat(path)  # before the listing: a change in between then shows as a newer time
            identity = (status.st_dev, status.st_ino)
            if identity in seen or (linked and own is not None and identity in own):
                continue
            seen.add(identity)
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] == ".":  # .git, .cache, and the ._photo.jpg that macOS leaves behind
                        hidden += not _is_folder(entry)
                    elif _is_folder(entry):
                        links = links or entry.is_symlink()
                        if own is not None or not entry.is_symlink():
                            folders.append((name, entry.is_symlink()))
                    elif (regular := _is_file(entry)) and name.rpartition(".")[2].lower() in _extensions:
                        files.append(name)
                    else:
                        kind = _kind_of(name) if regular else NOT_REGULAR
                        kinds[kind] = kinds.get(kind, 0) + 1
        except OSError as error:
            raise UserError(f"cannot list {path}: {error.strerror}") from None
        directories.append(directory)
        changed.append(status.st_mtime_ns)
        prefix = f"{directory}/" if directory else ""
        files.sort(key=natural)
        chunks.extend(f"{prefix}{name}\0" for name in files)
        folders.sort(key=lambda folder: natural(folder[0]), reverse=True)  # the last one in is the next one out
        waiting.extend((prefix + name, link) for name, link in folders)
    blob = np.frombuffer(os.fsencode("".join(chunks)), dtype=np.uint8)
    listing = Listing(Names(blob), kinds, hidden, Names.of(directories), np.array(changed, dtype=np.int64))
    return listing, seen, links


def _kind_of(name: str) -> str:
    """The extension; none where what follows the last dot is a number or long, as in names made of identifiers."""
    kind = name.rpartition(".")[2].lower() if "." in name else ""
    return "" if kind.isdigit() or len(kind) > LONGEST_EXTENSION else kind


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A dangling link counts as well: it will be reported as unreadable, not silently left out. A pipe would hang."""
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:
        return entry.is_symlink()


def natural(name: str) -> tuple[str, str]:
    """Sort key: ``img_2`` before ``img_10``. The name itself decides between ``img_1`` and ``img_01``.

    One string, since ten million lists of parts would take gigabytes: behind a character that no name has, each number
    has its length before it.
    """
    return _digits.sub(_with_length, name), name


def _with_length(number: re.Match[str]) -> str:
    digits = number[0].lstrip("0")
    return f"\0{chr(len(digits))}{digits}"


def cache_folder() -> Path:
    return Path(os.environ.get("INTERCLR_CACHE") or Path.home() / ".cache" / "interclr")


def _load(cache: Path, root: Path) -> Listing | None:
    """The cached listing, or None where it is missing, damaged or out of date."""
    try:
        with np.load(cache, allow_pickle=False) as arrays:
            if int(arrays["version"]) != CACHE_VERSION:
                return None
            kinds = dict(zip(Names(arrays["kinds"]), arrays["counts"].tolist(), strict=True))
            images, directories = Names(arrays["images"]), Names(arrays["directories"])
            listing = Listing(images, kinds, int(arrays["hidden"]), directories, arrays["changed"])
        now = [os.stat(os.path.join(root, directory)).st_mtime_ns for directory in directories.to_list()]
        return listing if now == listing.changed.tolist() else None
    except Exception:  # a cache may be damaged in any way; listing again is always right
        return None


def _save(cache: Path, listing: Listing) -> None:
    """Best effort: without a writable cache the folder is simply listed again."""
    temporary: str | None = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                version=np.array(CACHE_VERSION),
                images=listing.images.blob,
                kinds=Names.of(listing.kinds).blob,
                counts=np.array(list(listing.kinds.values()), dtype=np.int64),
                hidden=np.array(listing.hidden),
                directories=listing.directories.blob,
                changed=listing.changed,
            )
        os.replace(temporary, cache)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
