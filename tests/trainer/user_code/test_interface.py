"""Tests what a model may leave out."""

import keras

from trainer.user_code.interface import ModelInterface


def test_a_model_may_offer_nothing() -> None:
    found = ModelInterface.of(model := keras.Model())
    assert (found.batches_per_step, found.stacked, found.templates()) == (1, False, {"model": model})
    assert (found.serve(1), found.sampler, found.generator, found.optimizer) == (1, None, None, None)
    assert found.missing_for_fid == ("averaged_generator", "latent_dim")
