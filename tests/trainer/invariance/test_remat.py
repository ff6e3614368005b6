"""Tests that steps that recompute activations give the same numbers, and hold less."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.step_memory import peak
from tests.support import classifier_of, refused, run_steps, small
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.training.checkpoint import snapshot, variables_of

ROOT = Path(__file__).parents[3]
SLOW = pytest.mark.slow
BLOCKS = "--remat=blocks"
WGAN_GP, TEXT = ("--model=wgan_gp",), ("--model=tests.own_data:masked_text", "--data=tests.own_data:next_tokens")


@keras.saving.register_keras_serializable("test_remat")
class Block(keras.layers.Layer):
    """Draws, normalises and attends; its call has no `training`, which Keras tells its layers by another way."""

    def __init__(self, width: int = 8, **named: Any) -> None:
        super().__init__(**named)
        self.width = width
        self.attention = keras.layers.MultiHeadAttention(2, width // 2, dropout=0.2)
        self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        self.norm.build(shape)

    def call(self, values: Any) -> Any:
        return values + self.drop(self.norm(self.attention(values, values)))


def blocks(config: TrainConfig, dataset: Dataset, *, penalty: float = 0.0) -> keras.Model:
    layers: list[Any] = [keras.layers.Reshape((-1, 8)), *(Block(name=f"block{number}") for number in range(4))]
    layers += [
        keras.layers.GRU(4, dropout=0.2, activity_regularizer=keras.regularizers.L2(penalty) if penalty else None)
    ]
    model = keras.Sequential(
        [keras.Input(dataset.image_shape), *layers, keras.layers.Dense(10), keras.layers.Softmax()]
    )
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=1.0), "sparse_categorical_crossentropy")
    return model


def deep(config: TrainConfig, dataset: Dataset) -> keras.Model:
    layers = [keras.layers.Conv2D(8, 3, padding="same", activation="gelu") for _ in range(16)]
    return classifier_of(dataset.image_shape, *layers, keras.layers.GlobalAveragePooling2D())


def flat_classifier(dataset: Dataset, *layers: keras.layers.Layer) -> keras.Model:
    return classifier_of(dataset.image_shape, keras.layers.Flatten(), *layers, optimizer=keras.optimizers.SGD(0.1))


def dense_layers(config: TrainConfig, dataset: Dataset, *, frozen: int = 0, float32: int = -1) -> keras.Model:
    """Freezes the first layers after they were built, as fine-tuning does; one layer may be in float32."""
    dtypes = ["float32" if number == float32 else None for number in range(8)]
    layers = [keras.layers.Dense(16, "tanh", dtype=dtype) for dtype in dtypes]
    model = flat_classifier(dataset, *layers)
    for layer in layers[:frozen]:
        layer.trainable = False
    return model


class Recurrent(keras.layers.Layer):
    """Reads the mask of its input, though its call takes none."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.gru, self.supports_masking = keras.layers.GRU(8, return_sequences=True), True

    def build(self, shape: Any) -> None:
        self.gru.build(shape)

    def call(self, values: Any) -> Any:
        return values + self.gru(values)


def masked(config: TrainConfig, dataset: Dataset) -> keras.Model:
    tokens = keras.layers.Lambda(lambda values: keras.ops.cast(values > 0.5, "int32"))
    layers = [tokens, keras.layers.Embedding(2, 8, mask_zero=True), Recurrent(), Recurrent(), keras.layers.GRU(4)]
    return flat_classifier(dataset, *layers)


class Noise(keras.layers.Layer):
    def call(self, values: Any) -> Any:
        return values * tf.random.uniform(tf.shape(values), dtype=values.dtype)


def noisy(config: TrainConfig, dataset: Dataset) -> keras.Model:
    layers = [layer for _ in range(4) for layer in (keras.layers.Dense(8), Noise())]
    return flat_classifier(dataset, *layers)


OWN = (f"--model={__name__}:blocks",)
CNN = ("--model=cnn", "--image_size=20", "--dropout=0.3")
DENSE = f"--model={__name__}:dense_layers"


def states(*flags: str, remat: str) -> list[dict[str, Any]]:
    ways = (
        run_steps(small("--precision=float64", *flags, "--jit_compile=false", way), 3) for way in ("--remat=", remat)
    )
    return [snapshot(variables_of(model)) for model, _ in ways]


@pytest.mark.parametrize(("flags", "remat"), [
    pytest.param(CNN, BLOCKS, id="cnn"),
    pytest.param(OWN, BLOCKS, id="blocks", marks=SLOW),
    pytest.param((DENSE, "--frozen=3"), BLOCKS, id="frozen"),
    pytest.param((DENSE, "--float32=1", "--precision=mixed_bfloat16"), BLOCKS, id="mixed", marks=SLOW),
    pytest.param((f"--model={__name__}:masked",), BLOCKS, id="masked", marks=SLOW),
    pytest.param(OWN, "--remat=layers:block1,block3", id="layers", marks=SLOW),
    pytest.param((*CNN, "--replicas=2", "--micro_batches=2"), BLOCKS, id="passes", marks=SLOW),
    pytest.param(WGAN_GP, BLOCKS, id="wgan_gp", marks=SLOW),
])  # fmt: skip
def test_all_variables_are_those_of_plain_steps(flags: tuple[str, ...], remat: str) -> None:
    plain, recomputed = states(*flags, remat=remat)
    assert plain.keys() == recomputed.keys()
    assert [name for name in plain if not np.array_equal(plain[name], recomputed[name])] == []


@pytest.mark.parametrize(("flags", "line"), [
    (("--model=cnn", "--image_size=20", "--remat=layers:conv2"), "remat=layers:conv2: no such layer; did you mean"),
    ((*OWN, "--penalty=0.1", BLOCKS), "adds a loss of its activations, which nothing would differentiate: name"),
    ((f"--model={__name__}:noisy", BLOCKS), "draws by RandomUniform, which draws other numbers again"),
    ((*TEXT, BLOCKS), "has no block to recompute: no layer made of others, and no place where a single tensor"),
    (("--remat=all",), "remat=all must be blocks, or layers:NAME,… with names of layers"),
    (("--remat=layers:",), "remat=layers: must be blocks, or layers:NAME,… with names of layers"),
])  # fmt: skip
def test_what_cannot_be_recomputed_is_refused(flags: tuple[str, ...], line: str) -> None:
    with refused(line):
        run_steps(small(*flags, "--jit_compile=false"), 1)


@pytest.mark.slow
def test_a_deep_network_holds_half() -> None:
    flags = (f"--model={__name__}:deep", "--image_size=32", "--global_batch_size=64")
    plain, recomputed = (peak(*flags, f"--remat={remat}") for remat in ("", "blocks"))
    assert recomputed < 0.6 * plain
