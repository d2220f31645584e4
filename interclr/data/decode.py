"""From the bytes of an image file to (3, h, w) uint8 RGB, whatever the file holds.

Choices, the same for every image: the EXIF orientation is honoured; transparency is laid on white (dropping it would
show whatever colour happens to lie underneath); 16-bit values are scaled to 8 bits, not clipped; integers and floats of
no agreed range are stretched from their minimum to their maximum; of an animation the first frame counts. A file that
cannot be decoded whole is unreadable: half a picture is never handed on.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

# Of a picture of 90 megapixels or more Pillow says that it could be an attack, and refuses twice as many. The former is
# read without a word. For good, since it is read in threads, which share what is told apart for a while.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# Only these: some of Pillow's other readers start external programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")

ORIENTATION_TAG = 0x0112
ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of the header that tells the size


class UnreadableImage(Exception):
    """One image cannot be had. The loader counts and names it; it never ends a run unless the configuration says so."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both as arguments, so that it survives the way between processes
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def decode(data: bytes, name: str = "image", max_side: int | None = None) -> Tensor:
    """Decode an image file's bytes; with ``max_side`` the longer side is shrunk to it (never enlarged)."""
    with unreadable_as(name):
        return to_tensor(render(open_image(data, name), max_side))


def decode_interleaved(data: bytes, name: str = "image", max_side: int | None = None) -> Tensor:
    """The same (3, h, w), but in memory pixel by pixel, as decoders leave it: transposing takes a fifth of the time."""
    with unreadable_as(name):
        return torch.from_numpy(np.array(render(open_image(data, name), max_side))).permute(2, 0, 1)


def read_bytes(path: str, name: str) -> bytes:
    with unreadable_as(name), open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UnreadableImage(name, "not a regular file")
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    """A pipe would be waited for until somebody writes into it; regular files do not care."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextmanager
def unreadable_as(name: str) -> Iterator[None]:
    """Turn whatever a broken file makes the decoders raise into ``UnreadableImage``."""
    try:
        yield
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(name, "not an image in a known format") from None
    except Image.DecompressionBombError as error:
        raise UnreadableImage(name, f"too large: {error}") from None
    except OSError as error:
        raise UnreadableImage(name, error.strerror or str(error) or type(error).__name__) from None
    except Exception as error:  # Pillow's plug-ins raise nearly everything on damaged files
        raise UnreadableImage(name, f"{type(error).__name__}: {error}") from None


def open_image(data: bytes, name: str) -> Image.Image:
    """Read the header. The pixels are decoded later, by ``render``."""
    if not data:
        raise UnreadableImage(name, "the file is empty")
    with unreadable_as(name):
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except OSError:
            if _is_cut_off_webp(data):
                raise UnreadableImage(name, "truncated WebP file") from None
            raise
        if min(image.size) < 1:
            raise UnreadableImage(name, f"zero size: {image.width}×{image.height}")
        return image


def _is_cut_off_webp(data: bytes) -> bool:
    """Shorter than its header says. Pillow does not tell such a file from one that is damaged."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) < 8 + int.from_bytes(data[4:8], "little")


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) to 8; also 1 where EXIF is damaged, which is no reason to lose an image."""
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:
        return 1
    return value if value in ORIENTATIONS else 1


def render(image: Image.Image, max_side: int | None = None) -> Image.Image:
    """Decode the pixels into an upright, plain RGB image of at most ``max_side``."""
    if max_side is not None and max(image.size) > max_side:
        # JPEG decodes at 1/2, 1/4 or 1/8 for much less work; twice the target leaves the quality to the resize below.
        image.draft(None, (2 * max_side, 2 * max_side))
    image.load()
    turn = ORIENTATIONS.get(orientation(image))
    image = to_rgb(image)
    if max_side is not None and max(image.size) > max_side:
        scale = max_side / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS)
    return image if turn is None else image.transpose(turn)


def has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        return Image.fromarray(to_eight_bits(image)).convert("RGB")
    if has_alpha(image):
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def to_eight_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Grey values of more than 8 bits: 0..65535 becomes 0..255, other ranges are stretched."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and low >= 0 and high <= 65535):
        scaled = values / 257
    elif image.mode == "F" and low >= 0 and high <= 1:
        scaled = values * 255
    else:
        scaled = (values - low) / max(high - low, 1e-12) * 255
    return np.rint(scaled).astype(np.uint8)


def to_tensor(image: Image.Image) -> Tensor:
    # NumPy transposes in this thread alone; torch would wake a pool of its own in every loader worker.
    return torch.from_numpy(np.array(np.asarray(image).transpose(2, 0, 1), order="C"))  # (3, h, w)


def jpeg_size(data: NDArray[np.uint8]) -> tuple[int, int] | None:
    """Height and width from the header of a JPEG file, without decoding; None where there is no such header."""
    position = 2  # after the start marker
    while len(segment := data[position : position + 9].tolist()) == 9 and segment[0] == 0xFF:
        _, marker, length_high, length_low, _, height_high, height_low, width_high, width_low = segment
        if marker in JPEG_FRAMES:
            return height_high << 8 | height_low, width_high << 8 | width_low
        position += 1 if marker == 0xFF else 2 + (length_high << 8 | length_low)  # a marker may be padded
    return None
