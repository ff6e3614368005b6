"""Tests that the notebook runs from top to bottom, and that what it stores came from such a run on
no machine known."""

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.docs.sources import ROOT

NOTEBOOK = ROOT / "docs" / "from_fit_to_four_gpus.ipynb"
HERE = re.compile(r"(?<![\w.~])/(tmp|home|root|Users|var|private)/|site-packages")

Cells = list[dict[str, Any]]


def code_cells(path: Path) -> Cells:
    """Returns the cells of code."""
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def check_outputs(cells: Cells) -> None:
    """Asserts that every cell ran, in order and without an error, and left two figures and no path
    of a machine."""
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert ["".join(output["text"]) for output in outputs if output.get("name") == "stderr"] == []
    assert {output["output_type"] for output in outputs} == {
        "stream",
        "display_data",
        "execute_result",
    }
    figures = [
        output["data"].pop("image/png")
        for output in outputs
        if "image/png" in output.get("data", {})
    ]
    for figure in figures:
        with Image.open(io.BytesIO(base64.b64decode("".join(figure)))) as picture:
            assert len(picture.convert("RGB").getcolors(2**24) or ()) > 10, (
                "the figure shows nothing"
            )
    assert len(figures) == 2
    assert HERE.findall(json.dumps(outputs).replace(str(ROOT), "/home/")) == []


def test_the_stored_notebook_came_from_a_whole_run() -> None:
    check_outputs(code_cells(NOTEBOOK))


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    copy = tmp_path / "copy.ipynb"
    before = NOTEBOOK.read_bytes()
    words = [sys.executable, "-m", "docs.run_notebook", f"--out={copy}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    check_outputs(code_cells(copy))
    assert NOTEBOOK.read_bytes() == before
