"""Tests that models with LoRA train alike on replicas and are saved merged; test_keras_hub.py has
one of KerasHub."""

from pathlib import Path
from typing import Any

import numpy as np
from keras import Input, Model, Sequential, layers, optimizers
from numpy.testing import assert_allclose, assert_array_equal

from tests.fixtures import Log, parametrize
from tests.support import resolved, run_steps, saved_model, slow
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.run.export import export, load_template_weights, plain_copy

X = np.linspace(-1, 1, 12).reshape(3, 4)


def tuned(config: TrainConfig, dataset: Dataset, *, first_type: str | None = None) -> Model:
    """Trains LoRA's matrices in a layer that a configuration tells of, and in one within a layer,
    which none does."""
    x = Input((4,))
    first = layers.Dense(4, "tanh", dtype=first_type)
    attention = layers.MultiHeadAttention(2, 4)
    words = layers.Reshape((2, 2))(first(x))
    model = Model(x, layers.Dense(1)(layers.Flatten()(attention(words, words))))
    first.enable_lora(2)
    attention.query_dense.enable_lora(2)
    model.compile(optimizers.Adam(0.1), loss="mean_squared_error")
    return model


class Doubled(Model):
    """Has a layer that its configuration does not tell of."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = layers.Dense(units)

    def call(self, x: Any) -> Any:
        return 2 * self.dense(x)


def settings(*flags: str) -> TrainConfig:
    own = [
        f"--model={__name__}:tuned",
        "--data=tests.own_data:arrays",
        "--global_batch_size=16",
        *flags,
    ]
    return resolved(*own)


@parametrize("flags", [("--replicas=2",), slow(("--micro_batches=2",))])
def test_what_replicas_train_is_saved_merged_and_can_be_tuned_again(
    tmp_path: Path, caplog: Log, flags: tuple[str, ...]
) -> None:
    alone, _ = run_steps(settings("--precision=float64"), 5)
    model, _ = run_steps(settings("--precision=float64", *flags), 5)
    export(model, tmp_path / "model", None, save_optimizer=True)
    assert "model.keras has no state of the optimizer" in caplog.text
    saved = saved_model(tmp_path)
    assert [weight.path for weight in saved.weights if "lora" in weight.path] == []
    assert_allclose(saved(X), alone(X), rtol=1e-10)

    again, _ = run_steps(settings("--precision=float64"), 0)
    assert np.abs(again(X) - saved(X)).max() > 0.01
    load_template_weights(again, tmp_path / "model" / "model.keras")
    assert_allclose(again(X), saved(X), rtol=1e-12)
    # else none would train
    assert all(np.any(weight) for weight in again.weights if weight.name == "lora_kernel_a")


def test_a_copy_leaves_the_layers_of_a_subclassed_model_within_as_they_are() -> None:
    """Such a model is within its own copy; loaded as Keras loads, its matrices would be merged, and
    never train."""
    inner = Doubled(4)
    model = Sequential([Input((4,)), inner])
    inner.dense.enable_lora(2)
    before = [weight.numpy() for weight in inner.dense.weights]
    plain_copy(model)
    for weight, value in zip(inner.dense.weights, before, strict=True):
        assert_array_equal(weight, value)


def test_float32_matrices_of_a_16_bit_layer_train_on_several_replicas() -> None:
    model, _ = run_steps(settings("--first_type=bfloat16", "--replicas=2"), 5)
    kinds = {weight.dtype for weight in model.trainable_weights}
    assert kinds == {"bfloat16", "float32"}
    assert all(np.any(weight) for weight in model.weights if weight.name == "lora_kernel_b")
