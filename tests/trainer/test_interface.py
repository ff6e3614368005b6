"""Tests that one module reads what a model offers, and that imports between the rooms of trainer/ run downwards."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from trainer.interface import ModelInterface

ROOT = Path(__file__).parents[2] / "trainer"
FILES = sorted(ROOT.rglob("*.py"))
ORDER = (
    "__init__ errors log interface terminal|compat command storage config distribution data reporting models|training "
    "build|export training_run job check generate task"
)
LEVEL = {room: level for level, rooms in enumerate(ORDER.split()) for room in rooms.split("|")}


def upward(room: str, source: str) -> Iterator[str]:
    """Yields the imports that do not run downwards, also those within functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainer":
            names = node.module.split(".")[1:2] or [name.name for name in node.names]
            yield from (name for name in names if name != room and LEVEL[name] >= LEVEL[room])


def test_imports_run_downwards() -> None:
    found = {path: list(upward(path.relative_to(ROOT).with_suffix("").parts[0], path.read_text())) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}
    wrong = "def f():\n    from trainer import job, log\nfrom trainer.models.gan import x"
    assert sorted(upward("training", wrong)) == ["job", "models"]


ASKS_A_MODEL = re.compile(r"\b(?:hasattr|getattr)\((?:\w+\.)*_?(?:model|template|network|generator)\b")


def test_only_the_interface_reads_what_a_model_offers() -> None:
    found = [path.name for path in FILES if ASKS_A_MODEL.search(path.read_text())]
    assert found == ["interface.py"]


@pytest.mark.parametrize("batches", [1, 3])
def test_the_attributes_of_a_model_are_its_interface(batches: int) -> None:
    given = {"batches_per_step": batches, "templates": dict, "serve": str, "sample": abs, "averaged_generator": list}
    model = SimpleNamespace(**given, latent_dim=2)
    found = ModelInterface.of(model)
    assert (found.batches_per_step, found.stacked, found.templates, found.serve) == (batches, True, dict, str)
    assert (found.sampler, found.generator, found.missing_for_fid) == (model, model, ())


def test_a_model_may_offer_nothing() -> None:
    found = ModelInterface.of(model := keras.Model())
    assert (found.batches_per_step, found.stacked, found.templates()) == (1, False, {"model": model})
    assert (found.serve(1), found.sampler, found.generator, found.optimizer) == (1, None, None, None)
    assert found.missing_for_fid == ("averaged_generator", "latent_dim")
