"""Tests that the notebook runs from top to bottom, and that what it stores came from such a run on no machine known."""

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
MOST_BYTES = 150_000
HERE = re.compile(r"(?<![\w.~])/(tmp|home|root|Users|var|private)/|site-packages")
PLANNED = ("l4x1", "l4x2", "l4x4", "l4x8", "a100x1", "a100x4")

Cells = list[dict[str, Any]]


def code_cells(path: Path) -> Cells:
    """Returns the cells of code."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def printed(cells: Cells, beginning: str) -> str:
    """Returns what the cell printed that begins so."""
    (cell,) = [cell for cell in cells if "".join(cell["source"]).startswith(beginning)]
    return "".join("".join(output["text"]) for output in cell["outputs"])


def check_outputs(cells: Cells) -> None:
    """Asserts that every cell ran, in order and without an error, and left two figures and no path of a machine."""
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert ["".join(output["text"]) for output in outputs if output.get("name") == "stderr"] == []
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    figures = [output["data"].pop("image/png") for output in outputs if "data" in output]
    for figure in figures:
        with Image.open(io.BytesIO(base64.b64decode("".join(figure)))) as picture:
            assert len(picture.convert("RGB").getcolors(2**24) or ()) > 10, "the figure shows nothing"
    assert len(figures) == 2
    assert HERE.findall(json.dumps(outputs).replace(str(ROOT), "/home/")) == []


def check_story(cells: Cells) -> None:
    """Asserts that the cells showed what the text around them says."""
    beginnings = (
        "from vertex_trainer",
        "!python -m trainer.check ",
        "tiers = ",
        "settings = ",
        "!python -m deploy submit ",
    )
    task, check, plan, comparison, job = (printed(cells, beginning) for beginning in beginnings)
    (recognised,) = re.findall(r"fit: ([\d.]+)% of the 297 digits", printed(cells, "import keras\n"))
    accuracies = re.findall(r"(?m)^step \d+ .* val_accuracy ([\d.]+)", task)
    assert min(float(recognised) / 100, float(accuracies[-1])) > 0.9
    assert "5 steps on 1 and on 2 replicas give the same weights and losses" in check
    assert {*re.findall(r"(?m)^(\S+) +(?:standard|spot) +fits ", plan)} == {*PLANNED}
    assert re.search(
        r"(?m)^Against l4x1 \(standard\), by the middle values: .*, l4x4 [\d.]+ x as fast for [\d.]+ x the money", plan
    )
    (percent,) = re.findall(r"(?m)^The final losses agree within ([\d.]+) %", comparison)
    assert float(percent) < 1e-6
    assert "Simulated devices: l4x1 and l4x4: their speeds do not apply to real machines" in comparison
    assert "20.00 USD at most" in job
    assert ": g2-standard-48 + 4 x NVIDIA_L4 in us-central1, STANDARD" in job
    assert "l4x4: fits the memory" in job  # the plan above was found


def test_the_stored_notebook_came_from_a_whole_run() -> None:
    check_outputs(code_cells(NOTEBOOK))
    check_story(code_cells(NOTEBOOK))
    assert NOTEBOOK.stat().st_size < MOST_BYTES


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    copy, before = tmp_path / "copy.ipynb", NOTEBOOK.read_bytes()
    words = [sys.executable, "-m", "docs.run_notebook", f"--out={copy}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    check_outputs(code_cells(copy))
    check_story(code_cells(copy))
    assert NOTEBOOK.read_bytes() == before
