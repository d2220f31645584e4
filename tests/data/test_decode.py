"""Decoding: each odd kind of file ends as the expected 8-bit RGB, or as ``UnreadableImage``."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from interclr.data.decode import ORIENTATION_TAG, UnreadableImage, decode, decode_interleaved, jpeg_size
from interclr.data.folder import open_folder


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    small = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def plain(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_lossless_formats_are_exact(kind: str, mode: str) -> None:
    image = noise(mode=mode)
    options = {"lossless": True} if kind == "WEBP" else {}
    decoded = decode(encode(image, kind, **options))
    assert decoded.dtype == torch.uint8
    assert decoded.is_contiguous()
    assert torch.equal(decoded, plain(image))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    decoded = decode(encode(Image.fromarray(values), kind))
    assert decoded[:, 0].tolist() == [[0, 1, 128, 255]] * 3


def test_floats_and_wide_integers_are_stretched() -> None:
    unit = decode(encode(Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32)), "TIFF"))
    assert unit[0, 0].tolist() == [0, 128, 255]
    wide = decode(encode(Image.fromarray(np.array([[-100, 100_000]], dtype=np.int32)), "TIFF"))
    assert wide[0, 0].tolist() == [0, 255]
    flat = decode(encode(Image.fromarray(np.full((1, 2), 1e6, dtype=np.float32)), "TIFF"))
    assert flat.shape == (3, 1, 2)


def test_transparency_is_laid_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert decode(encode(image, "PNG"))[:, 0].T.tolist() == [[255, 255, 255], [10, 20, 30]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 100, 0])
    palette.putpixel((1, 0), 1)
    assert decode(encode(palette, "PNG"))[:, 0].T.tolist() == [[200, 0, 0], [0, 100, 0]]
    assert decode(encode(palette, "PNG", transparency=0))[:, 0].T.tolist() == [[255, 255, 255], [0, 100, 0]]


def test_cmyk_becomes_rgb() -> None:
    decoded = decode(encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100))
    assert decoded[0].min() > 240
    assert decoded[1:].max() < 15


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    decoded = decode(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert decoded[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("max_side", [None, 16])
def test_exif_orientation_is_honoured(number: int, max_side: int | None) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[ORIENTATION_TAG] = number
    data = encode(noise(64, 32), "JPEG", exif=exif, quality=95)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    decoded = decode(data, max_side=max_side)
    if max_side is None:
        assert torch.equal(decoded, plain(upright))
    else:
        assert decoded.shape == ((3, 16, 8) if number >= 5 else (3, 8, 16))
        reference = plain(upright.resize((decoded.shape[2], decoded.shape[1]), Image.Resampling.LANCZOS))
        assert (decoded.float() - reference.float()).abs().mean() < 4


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_lose_the_image() -> None:
    data = encode(noise(), "JPEG", exif=b"Exif\x00\x00MM\x00*garbage-garbage")
    assert decode(data).shape == (3, 30, 40)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("size", "expected"), [((900, 300), (33, 100)), ((100, 50), (50, 100)), ((3000, 2), (1, 100))])
def test_max_side_shrinks_and_never_enlarges(kind: str, size: tuple[int, int], expected: tuple[int, int]) -> None:
    data = encode(noise(*size), kind)
    assert decode(data, max_side=100).shape[1:] == expected
    if size[1] == 300:
        reference = plain(noise(*size).resize((100, 33), Image.Resampling.LANCZOS))
        assert (decode(data, max_side=100).float() - reference.float()).abs().mean() < 4
    assert decode(data, max_side=5000).shape[1:] == size[::-1]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files_are_unreadable(kind: str, share: float) -> None:
    data = encode(noise(200, 150), kind)
    with pytest.raises(UnreadableImage):
        decode(data[: int(len(data) * share)], "half")


@pytest.mark.parametrize("data", [b"", b"hello", b"\xff\xd8\xff", b"P6 0 0 255\n", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_non_images_are_unreadable(data: bytes) -> None:
    with pytest.raises(UnreadableImage, match=r"^odd: ."):
        decode(data, "odd")


def test_every_flipped_byte_decodes_or_is_unreadable() -> None:
    random = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP"):
        original = encode(noise(), kind)
        for _ in range(40):
            damaged = bytearray(original)
            damaged[random.integers(len(damaged))] ^= int(random.integers(1, 256))
            with contextlib.suppress(UnreadableImage):
                assert decode(bytes(damaged)).dtype == torch.uint8


def test_decompression_bomb_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(noise(100, 100), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UnreadableImage, match="too large"):
        decode(data, "bomb")


def test_unreadable_image_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(UnreadableImage("a.jpg", "broken")))
    assert (error.name, error.reason, str(error)) == ("a.jpg", "broken", "a.jpg: broken")


def odd_files() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    files = {
        f"{mode} {kind}": encode(noise(mode=mode), kind) for mode in ("RGB", "L") for kind in ("PNG", "BMP", "GIF")
    }
    files |= {f"JPEG {mode}": encode(noise(61, 33, mode), "JPEG") for mode in ("RGB", "L", "CMYK")}
    files |= {
        "alpha": encode(noise(mode="RGBA"), "PNG"),
        "palette": encode(noise(mode="P"), "PNG"),
        "16 bits": encode(Image.fromarray(np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000), "PNG"),
        "turned": encode(noise(64, 32), "JPEG", exif=exif),
        "progressive": encode(noise(61, 33), "JPEG", progressive=True),
        "finely sampled": encode(noise(61, 33), "JPEG", subsampling=0),
        "one pixel": encode(noise(1, 1), "JPEG"),
    }
    return files


@pytest.mark.parametrize("max_side", [None, 20])
@pytest.mark.parametrize("name", odd_files())
def test_interleaved_pixels_are_the_same(name: str, max_side: int | None) -> None:
    data = odd_files()[name]
    interleaved = decode_interleaved(data, max_side=max_side)
    assert torch.equal(interleaved, decode(data, max_side=max_side))
    assert interleaved.permute(1, 2, 0).is_contiguous()
    with pytest.raises(UnreadableImage, match=r"^half: "):
        decode_interleaved(data[: len(data) // 2], "half", max_side)


def test_size_of_a_jpeg_from_its_header() -> None:
    for name, data in odd_files().items():
        array = np.frombuffer(data, np.uint8)
        if data.startswith(b"\xff\xd8"):
            width, height = Image.open(io.BytesIO(data)).size
            assert jpeg_size(array) == (height, width), name
            position = data.index(b"\xff\xdb")  # markers may be padded
            padded = data[:position] + b"\xff\xff\xff" + data[position:]
            assert jpeg_size(np.frombuffer(padded, np.uint8)) == (height, width), name
        else:
            assert jpeg_size(array) is None, name
    jpeg = encode(noise(300, 200), "JPEG")
    frame = jpeg.index(b"\xff\xc0")
    assert jpeg_size(np.frombuffer(jpeg[: frame + 9], np.uint8)) == (200, 300)
    assert all(jpeg_size(np.frombuffer(jpeg[:end], np.uint8)) is None for end in range(frame + 9))


@pytest.mark.parametrize("max_side", [None, 20])
def test_a_folder_reads_the_same_pixels(max_side: int | None, tmp_path: Path) -> None:
    """Interleaved in memory, as decoders leave them."""
    files = odd_files()
    for name, data in files.items():
        (tmp_path / f"{name}.png").write_bytes(data)  # what a file is tells its content, not its name
    source = open_folder(tmp_path, max_side=max_side)
    assert len(source) == len(files)
    for index in range(len(source)):
        name, image = source.name_of(index), source.read(index)
        assert torch.equal(image, decode(files[name.removesuffix(".png")], max_side=max_side)), name
        assert image.permute(1, 2, 0).is_contiguous(), name
