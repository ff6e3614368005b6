"""Makes an animated picture of a run's sample grids: how its images came to be. Imports no TensorFlow.

It is a GIF, which Pillow writes by itself; for WebP it needs a library that not every installation has.
"""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from trainer.base.run_files.run_layout import STEP_PREFIX

_MOST_FRAMES = 24
_LONGEST = 640  # pixels of a frame's longer side; 24 grids of noise, 16x16 pixels each image, are 3 MB
_FRAME_MS, _LAST_MS = 250, 2000
_SAMPLE = re.compile(rf"{STEP_PREFIX}\d{{8,12}}\.png")


def frames_of(names: Iterable[str]) -> list[str]:
    """Returns the names of the sample grids to show: the first, the last, and evenly many of those between them."""
    samples = sorted(name for name in names if _SAMPLE.fullmatch(name))
    shown = min(len(samples), _MOST_FRAMES)
    return [samples[round(place * (len(samples) - 1) / max(shown - 1, 1))] for place in range(shown)]


def animated(files: Sequence[Path]) -> bytes:
    """Returns the GIF of these pictures, in their order, without those of another size than the last.

    Those that cannot be read are left out too; empty if none is left.
    """
    frames = [frame for frame in map(_frame, files) if frame is not None]
    frames = [frame for frame in frames if frame.size == frames[-1].size]
    content = io.BytesIO()
    if frames:
        times = [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS]
        frames[0].save(content, "gif", save_all=True, append_images=frames[1:], duration=times, loop=0)
    return content.getvalue()


def _frame(file: Path) -> Any:
    """Returns a picture as a frame with at most 256 colours; None if it cannot be read."""
    try:
        with Image.open(file, formats=["PNG"]) as image:
            image.thumbnail((_LONGEST, _LONGEST), Image.Resampling.BOX)
            return image.copy() if image.mode == "L" else image.convert("RGB").quantize(256)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # damaged, or gone
        return None
