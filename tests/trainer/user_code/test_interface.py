"""Tests that only one module reads what a model offers."""

import re
from pathlib import Path

import keras

from trainer.user_code.interface import ModelInterface

FILES = sorted((Path(__file__).parents[3] / "trainer").rglob("*.py"))
ASKS_A_MODEL = re.compile(r"\b(?:hasattr|getattr)\((?:\w+\.)*_?(?:model|template|network|generator)\b")


def test_a_model_may_offer_nothing() -> None:
    found = ModelInterface.of(model := keras.Model())
    assert (found.batches_per_step, found.stacked, found.templates()) == (1, False, {"model": model})
    assert (found.serve(1), found.sampler, found.generator, found.optimizer) == (1, None, None, None)
    assert found.missing_for_fid == ("averaged_generator", "latent_dim")
