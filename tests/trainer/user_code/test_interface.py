"""Tests that only one module reads what a model offers."""

import re
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from trainer.user_code.interface import ModelInterface

FILES = sorted((Path(__file__).parents[3] / "trainer").rglob("*.py"))
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
