"""Decodes image files of any kind to (size, size, channels) uint8, with Pillow.

All files are treated alike: the EXIF orientation is applied; more than 8 bits are scaled, not clipped; transparency is
blended over white; of an animation the first frame is used; the middle square is cropped and resized (bicubic,
antialiased) to `size`.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, features

from trainer.base.errors import reason

# Recognised by content. Other plug-ins of Pillow run programs. Wheels of Pillow read AVIF from 11.3 on.
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"), "PNG": (".png", ".apng"), "GIF": (".gif",), "BMP": (".bmp",),
    "WEBP": (".webp",), "TIFF": (".tif", ".tiff"), "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    **({"AVIF": (".avif", ".avifs")} if "avif" in features.get_supported_modules() else {}),
}  # fmt: skip
IMAGE_SUFFIXES = frozenset(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
_FORMATS = (*_SUFFIXES,)
MOST_PIXELS = 100_000_000  # larger images are rejected as decompression bombs

_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
_ORIENTATION = 0x0112  # of EXIF
_BITS_PER_SAMPLE, _SAMPLE_FORMAT, _SIGNED = 258, 339, 2  # of TIFF 6.0


class BadImage(Exception):
    """Represents a file that cannot be decoded; the text is the reason."""


def decode(source: Path | bytes, size: int, channels: int) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Returns the image as (size, size, channels) uint8, and the conversions made. Raises BadImage if that fails."""
    try:
        return _decode(io.BytesIO(source) if isinstance(source, bytes) else source, size, channels)
    except BadImage:
        raise
    except MemoryError as error:
        raise BadImage("it does not fit into memory") from error
    except Exception as error:  # Pillow's plug-ins raise any exception for a damaged file
        raise BadImage(reason(error)) from error


def _decode(source: Any, size: int, channels: int) -> tuple[npt.NDArray[np.uint8], list[str]]:
    with Image.open(source, formats=_FORMATS) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise BadImage(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}: a decompression bomb?")
        image.draft("RGB" if channels == 3 else "L", (2 * size, 2 * size))  # decodes a JPEG at a lower resolution
        rawmode = image.tile[0][3] if image.tile else None
        image.load()
        converted = ["animation"] if getattr(image, "n_frames", 1) > 1 else []
        if rawmode == "RGB;16B" and "transparency" in image.info:  # Pillow compares its high bytes only
            raise BadImage("it has 16 bits per colour and a transparent one: convert it to 8 bits")
        upright: Image.Image = image
        if image.getexif().get(_ORIENTATION, 1) not in (0, 1):
            upright = ImageOps.exif_transpose(image)
            converted.append("orientation")
        plain = _without_alpha(_with_8_bits(upright, getattr(image, "tag_v2", {}), converted), converted)
        mode = "RGB" if channels == 3 else "L"
        if plain.mode != mode:
            converted.append(f"{_kind(plain.mode)} to {'colour' if channels == 3 else 'grey'}")
            plain = plain.convert(mode)
        if plain.size != (size, size):
            plain = ImageOps.fit(plain, (size, size), method=Image.Resampling.BICUBIC)
        return np.asarray(plain, np.uint8).reshape(size, size, channels), converted


def _with_8_bits(image: Image.Image, tags: Any, converted: list[str]) -> Image.Image:
    """Returns a grey image of 16 bits per pixel with 8, and with alpha if one of its levels is transparent.

    `tags`: those of a TIFF file.
    """
    if image.mode not in _DEEP_GREY:
        return image
    bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
    levels = np.asarray(image)
    if image.mode == "F" or bits > 16 or levels.min() < 0:
        raise BadImage("its pixels are numbers below 0, or of 32 bits and unknown range: convert it to 8 or 16 bits")
    white = 2 ** (bits - (tags.get(_SAMPLE_FORMAT, (1,))[0] == _SIGNED)) - 1
    converted.append(f"{bits} bits to 8")
    grey = Image.fromarray(np.rint(levels * (255 / white)).astype(np.uint8))
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray((levels != image.info["transparency"]).astype(np.uint8) * 255))
    return grey


def _without_alpha(image: Image.Image, converted: list[str]) -> Image.Image:
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        converted.append("transparency over white")
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("L" if image.mode in ("L", "LA", "1") else "RGB")
    return image


def _kind(mode: str) -> str:
    return {"L": "grey", "1": "black and white", "P": "palette", "RGB": "colour"}.get(mode, mode)
