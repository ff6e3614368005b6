"""Makes what the pages name: FOLDER (idx files), photos, table.csv, mine.py, my_models, empty
programs."""

import json
import re
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from tests.docs.sources import ROOT

COUNT = 24


def code_of_readme() -> list[str]:
    """Returns the Python blocks of README: train.py, a script that calls fit, and mine.py."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def make_stand_ins(folder: Path) -> None:
    """Makes them in `folder`: random images of 10 classes, a table of examples/table.py, and the
    pages' code."""
    draw = np.random.default_rng(0)
    (folder / "FOLDER").mkdir(parents=True)
    for part in ("train", "t10k"):
        pixels = draw.integers(0, 256, (COUNT, 28, 28), np.uint8)
        labels = np.arange(COUNT, dtype=np.uint8) % 10
        images, classes = (
            folder / "FOLDER" / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")
        )
        images.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, COUNT, 28, 28) + pixels.tobytes())
        classes.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, COUNT) + labels.tobytes())
    (folder / "photos").mkdir()
    for number in range(COUNT):
        pixels = draw.integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    (folder / "my").mkdir()
    for program in ("train.py", "my/task.py"):
        (folder / program).write_text("")
    (folder / "mine.py").write_text(code_of_readme()[1])
    (folder / "my_models").mkdir()
    (folder / "my_models" / "__init__.py").touch()
    cells = json.loads((ROOT / "docs" / "from_fit_to_four_gpus.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]
    (code,) = (
        text
        for cell in cells
        if (text := "".join(cell["source"])).startswith("%%writefile my_models/digits.py\n")
    )
    (folder / "my_models" / "digits.py").write_text(code.partition("\n")[2])
    rows = [f"{','.join(map(str, draw.uniform(0, 1, 5)))},red,1" for _ in range(COUNT)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,d,e,colour,target", *rows]))
