"""Gradients of a token that a batch repeats are summed before an optimizer squares them, and a run
says so."""

from pathlib import Path
from typing import Any

import tensorflow as tf
from keras import Input, Model, Sequential, initializers, layers, ops, optimizers
from numpy.random import default_rng

from tests.fixtures import Log
from tests.support import in_float64, largest_difference, prepared, resolved, run_steps, weights

ROWS = 48
BATCH = 8
TOKENS = 4


class Table(layers.Layer):
    """Looks up as an Embedding does, by a product: its gradient is as large as its table, and of
    sums."""

    def build(self, shape: Any) -> None:
        initializer = initializers.RandomNormal(seed=1)
        self.table = self.add_weight(shape=(TOKENS, 3), initializer=initializer, name="table")

    def call(self, inputs: Any) -> Any:
        return ops.one_hot(inputs, TOKENS, dtype=self.compute_dtype) @ self.table


def batches(config: Any = None) -> Any:
    tokens = default_rng(0).integers(0, TOKENS, (ROWS, 3)).astype("int32")
    return tf.data.Dataset.from_tensor_slices((tokens, tokens.sum(1, keepdims=True) - 4.0)).batch(
        BATCH
    )


def build(config: Any, dataset: Any, *, by_product: bool = False, rule: str = "adam") -> Model:
    first, second = (initializers.RandomNormal(seed=seed) for seed in (1, 2))
    table = Table() if by_product else layers.Embedding(TOKENS, 3, embeddings_initializer=first)
    last = layers.Dense(1, kernel_initializer=second)
    model = Sequential([Input((3,), dtype="int32"), table, layers.GlobalAveragePooling1D(), last])
    model.compile({"adam": optimizers.Adam(0.125), "sgd": optimizers.SGD(0.125)}[rule], "mse")
    return model


def config_of(*flags: str) -> Any:
    words = [
        f"--model={__name__}:build",
        f"--data={__name__}:batches",
        f"--global_batch_size={BATCH}",
        "--steps=6",
    ]
    return resolved(*words, "--precision=float64", *flags)


def test_slices_of_a_token_are_summed_first() -> None:
    """Keras rounds the rates of Adam to float32, in float64 too."""
    in_float64()
    fitted = [build(None, None, by_product=by_product) for by_product in (False, True)]
    for model in fitted:
        model.fit(batches(), shuffle=False, verbose=0)
    by_slices, by_sums = map(weights, fitted)
    assert largest_difference(by_slices, by_sums) > 1e-2
    alone, together = (
        weights(run_steps(config_of(f"--replicas={n}"), ROWS // BATCH)[0]) for n in (1, 2)
    )
    assert largest_difference(by_sums, alone) < 1e-4
    assert largest_difference(alone, together) < 1e-10


def test_a_run_says_so(tmp_path: Path, caplog: Log) -> None:
    line = (
        "embedding: gradients of a token that a batch repeats are summed before Adam squares them"
    )
    for rule, said in (("sgd", False), ("adam", True)):
        prepared(config_of(f"--rule={rule}", f"--job_dir={tmp_path / rule}"))
        assert (line in caplog.text) == said
