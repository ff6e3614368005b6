"""Tests that the notebook runs from top to bottom, and that what is stored in it came from such a run."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.docs.sources import ROOT

NOTEBOOK = ROOT / "docs" / "from_fit_to_four_gpus.ipynb"
MOST_BYTES = 300_000


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Returns the cells of code."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """Returns what a cell printed."""
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def figures(cells: list[dict[str, Any]]) -> list[Image.Image]:
    """Returns the pictures in the outputs."""
    found = [output["data"]["image/png"] for cell in cells for output in cell["outputs"] if "data" in output]
    return [Image.open(io.BytesIO(base64.b64decode("".join(each)))) for each in found]


def check(cells: list[dict[str, Any]]) -> None:
    """Asserts that every cell ran, in order and without an error, and showed what the text around it says."""
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}
    assert [picture.width > 300 for picture in figures(cells)] == [True, True]
    shown = {"".join(cell["source"]): printed(cell) for cell in cells}
