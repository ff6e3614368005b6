"""Draws shapes and text on a white picture, by Pillow and the font that it holds."""

import functools
import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
WHITE, GREY, TEXT = (255, 255, 255), (205, 208, 212), (40, 44, 52)


@functools.lru_cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def width_of(text: str, size: int) -> int:
    """Returns the width of a line of text, in pixels."""
    return math.ceil(_font(size).getlength(text))


class Canvas:
    """Holds a picture of `width` x `height` pixels; positions are from its left and its top."""

    def __init__(self, width: int, height: int) -> None:
        self._image = Image.new("RGB", (width, height), WHITE)
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, text: str, size: int, anchor: str = "la", fill: Colour = TEXT) -> None:
        """Writes a line; `anchor`: its point at (x, y), by two letters of Pillow's (l, m, r and t, m, s)."""
        self._draw.text((x, y), text, fill=fill, font=_font(size), anchor=anchor)

    def upright(self, x: float, y: float, text: str, size: int) -> None:
        """Writes a line upwards around x, with its end at y."""
        label = Image.new("L", (max(1, width_of(text, size)), size + 4))
        ImageDraw.Draw(label).text((0, (size + 4) / 2), text, fill=255, font=_font(size), anchor="lm")
        turned = label.rotate(90, expand=True)
        self._image.paste(TEXT, (round(x - turned.width / 2), round(y)), turned)

    def box(
        self, left: float, top: float, right: float, bottom: float, fill: Colour | None = None,
        line: Colour | None = None,
    ) -> None:  # fmt: skip
        """Draws a rectangle."""
        self._draw.rectangle((left, top, right, bottom), fill=fill, outline=line)

    def line(self, start: tuple[float, float], end: tuple[float, float], fill: Colour, width: int = 1) -> None:
        """Draws a straight line."""
        self._draw.line((start, end), fill=fill, width=width)

    def paste(self, left: int, top: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Puts pixels, (height, width, 3), on the picture."""
        self._image.paste(Image.fromarray(pixels), (left, top))

    def png(self) -> bytes:
        """Returns the picture as a PNG file."""
        content = io.BytesIO()
        self._image.save(content, "png", optimize=True)
        return content.getvalue()
