"""Decodes image files of any kind to (size, size, channels) uint8, with Pillow.

All files are treated alike: the EXIF orientation is applied; 16-bit grey is scaled, not clipped; transparency is
blended over white; of an animation the first frame is used; the middle square is cropped and resized (bicubic,
antialiased) to `size`.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from trainer.errors import reason

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")  # by content; other plug-ins of Pillow run programs
SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MOST_PIXELS = 100_000_000  # larger images are rejected as decompression bombs

_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")


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
        image.load()
        converted = ["animation"] if getattr(image, "n_frames", 1) > 1 else []
        upright = ImageOps.exif_transpose(image)
        if upright.size != image.size or image.getexif().get(0x0112, 1) not in (0, 1):
            converted.append("orientation")
        plain = _without_depth_and_alpha(upright, converted)
        mode = "RGB" if channels == 3 else "L"
        if plain.mode != mode:
            converted.append(f"{_kind(plain.mode)} to {'colour' if channels == 3 else 'grey'}")
            plain = plain.convert(mode)
        fitted = ImageOps.fit(plain, (size, size), method=Image.Resampling.BICUBIC)
        return np.asarray(fitted, np.uint8).reshape(size, size, channels), converted


def _without_depth_and_alpha(image: Image.Image, converted: list[str]) -> Image.Image:
    """Returns the image with 8 bits per channel and without transparency."""
    if image.mode in _SIXTEEN_BIT:
        converted.append("16 bits to 8")
        levels = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(np.rint(levels / 257).astype(np.uint8))
    if image.mode == "F":
        raise BadImage("its pixels are floating-point numbers of unknown range: convert it to 8 or 16 bits")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        converted.append("transparency over white")
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("L" if image.mode in ("L", "LA", "1") else "RGB")
    return image


def _kind(mode: str) -> str:
    return {"L": "grey", "1": "black and white", "P": "palette", "RGB": "colour"}.get(mode, mode)
