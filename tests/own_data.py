"""Data of every kind that a function of the user's may return, and models for them, named by dotted
path."""

from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras import Input, Model, Sequential, layers, losses, ops, optimizers, regularizers
from numpy.random import default_rng

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset

ROWS = 50  # of which 48 are whole batches of 16


def _table(rows: int = ROWS, seed: int = 0) -> tuple[Any, Any, Any]:
    draw = default_rng(seed)
    x = draw.normal(size=(rows, 4))
    return x, x @ [1.0, -2.0, 0.5, 0.0] + 1.0, draw.uniform(0.5, 2.0, rows)


def arrays(config: TrainConfig) -> Any:
    return _table()[:2]


def weighted(config: TrainConfig) -> Any:
    return _table()


def pair(config: TrainConfig) -> Any:
    return _table()[:2], _table(21, seed=1)[:2]


def weighted_pair(config: TrainConfig) -> Any:
    return _table(), _table(21, seed=1)


def more(
    config: TrainConfig, *, rows: int = 11, columns: int = 4, parts: Literal[1, 2, 3] = 2
) -> Any:
    """Returns rows that no run was trained on: x, (x, y) or (x, y, sample_weight)."""
    x, y, weight = _table(rows, seed=7)
    return (x[:, :columns], y, weight)[:parts] if parts > 1 else x[:, :columns]


def words(config: TrainConfig) -> Any:
    """Returns texts where the model takes numbers."""
    return np.full((ROWS, 4), "word")


class Rows:
    """Has what torch.utils.data.Dataset asks for."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: int) -> Any:
        return tuple(column[row] for column in self.columns)


def rows(config: TrainConfig) -> Any:
    return Rows(*_table())


def list_of_rows(config: TrainConfig) -> Any:
    return [*zip(*_table(), strict=True)], [*zip(*_table(21, seed=1), strict=True)]


class Batches(keras.utils.PyDataset):
    def __init__(self, columns: Any, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.columns = columns
        self.size = size
        self.epochs = 0

    def __len__(self) -> int:
        return -(-len(self.columns[0]) // self.size)

    def __getitem__(self, batch: int) -> Any:
        """Turns the rows of a batch by a count of epochs, so that a missed hook of theirs changes
        the numbers."""
        rows = slice(batch * self.size, (batch + 1) * self.size)
        return tuple(np.roll(column[rows], self.epochs, axis=0) for column in self.columns)

    def on_epoch_begin(self) -> None:
        self.epochs += 2

    def on_epoch_end(self) -> None:
        self.epochs += 1


def batches(config: TrainConfig) -> Any:
    return Batches(_table(), config.global_batch_size, workers=2), Batches(_table(21, seed=1), 8)


def tf_examples(config: TrainConfig) -> Any:
    return tf.data.Dataset.from_tensor_slices(_table()).shuffle(20, seed=3)


def taken(config: TrainConfig) -> Any:
    return (rows := tf_examples(config)).skip(18), rows.take(18)


def tf_batches(config: TrainConfig) -> Any:
    train = tf.data.Dataset.from_tensor_slices(_table()).batch(7)
    return train, tf.data.Dataset.from_tensor_slices(_table(21, seed=1)).batch(
        5, drop_remainder=True
    )


def both(config: TrainConfig) -> Any:
    """Returns what Keras's image_dataset_from_directory(subset="both") returns: a list, shuffled
    anew in each epoch."""
    train, evaluation = tf_batches(config)
    return [
        train.unbatch()
        .shuffle(20, seed=3)
        .batch(7)
        .apply(tf.data.experimental.assert_cardinality(8)),
        evaluation,
    ]


def batches_and_arrays(config: TrainConfig) -> Any:
    return batches(config)[0], _table(21, seed=1)


def windows(config: TrainConfig) -> Any:
    """Returns batches of whose windows TensorFlow does not know the length, and arrays for
    evaluation."""
    draw = default_rng(0).normal(size=(60, 7))
    made = keras.utils.timeseries_dataset_from_array(
        draw, draw[10:, 0], sequence_length=10, batch_size=16
    )
    assert made.element_spec[0].shape.as_list() == [None, None, 7]
    return made, (draw[:48].reshape(16, 3, 7)[:, [0] * 10], draw[:16, 0])


def uneven_windows(config: TrainConfig) -> Any:
    rows = tf.data.Dataset.range(1072).map(lambda row: (tf.zeros([3 + row // 1056]), 0.0))
    return rows.padded_batch(16, padded_shapes=([None], []))


def tf_endless(config: TrainConfig) -> Any:
    return tf.data.Dataset.from_tensor_slices(_table()).repeat()


def named_inputs(config: TrainConfig) -> Any:
    x, y, _ = _table()
    return {"left": x[:, :2], "right": x[:, 2:], "kind": np.arange(ROWS) % 3}, {
        "value": y,
        "positive": y > 0,
    }


def inputs_alone(config: TrainConfig) -> Any:
    return _table()[0]


def _and_first(x: Any, y: Any) -> Any:
    """Returns the rows for training, and the first 21 of them for evaluation."""
    return (x, y), tf.nest.map_structure(lambda part: part[:21], (x, y))


def masks(config: TrainConfig) -> Any:
    images = default_rng(0).integers(0, 256, (ROWS, 8, 8, 3), np.uint8)
    return _and_first(images, (images[..., :1] > 128).astype("int32"))


def several_labels(config: TrainConfig) -> Any:
    return _and_first(inputs_alone(config), (inputs_alone(config) > 0).astype("int32"))


def classes(config: TrainConfig) -> Any:
    return _and_first(inputs_alone(config), np.argmax(inputs_alone(config), axis=1)[:, None])


def classes_as_floats(config: TrainConfig) -> Any:
    (x, y), (other_x, other_y) = classes(config)
    return (x, y.astype(np.float32)), (other_x, other_y.astype(np.float32))


def weighted_classes(config: TrainConfig) -> Any:
    return *classes(config)[0], np.ones(ROWS)


def tokens(config: TrainConfig) -> Any:
    draw = default_rng(0)
    x = draw.integers(1, 20, (ROWS, 6)) * (np.arange(6) < draw.integers(2, 7, ROWS)[:, None])
    return x, (x.sum(axis=1) > 40).astype("int32"), draw.uniform(0.5, 2.0, ROWS)


# What must be refused.


class _Read(Rows):
    """Has rows that `change` makes of a number and a row."""

    def __init__(self, change: Any) -> None:
        super().__init__(*_table()[:2])
        self.change = change

    def __getitem__(self, row: int) -> Any:
        return self.change(row, *super().__getitem__(row))


def breaks_at_7(config: TrainConfig) -> Any:
    """Has labels for 7 rows alone, whatever its length says."""
    return _Read(lambda row, x, y: (x, ([y] * 7)[row]))


def ragged_rows(config: TrainConfig) -> Any:
    return _Read(lambda row, x, y: (x[: 3 + (row < 40)], y))


def moody_rows(config: TrainConfig) -> Any:
    return _Read(lambda row, x, y: (x + np.random.normal(size=4), y))


def nan_inputs(config: TrainConfig) -> Any:
    return np.where(np.arange(ROWS)[:, None] == 5, np.nan, inputs_alone(config)), np.zeros(ROWS)


def sentences(config: TrainConfig) -> Any:
    words = np.array(["now", "win", "cash", "home", "see", "you"])
    chosen = default_rng(0).integers(0, 6, (ROWS, 5))
    return np.array([" ".join(each) for each in words[chosen]]), (chosen < 3).mean(axis=1)


def colours(config: TrainConfig, *, palette: str = "red green blue") -> Any:
    """Returns text and a number of its own for each, as examples and for evaluation."""
    pairs = (
        np.array(palette.split() * 16),
        np.array([float(len(name)) for name in palette.split() * 16]),
    )
    return pairs, pairs


def colour_model(
    config: TrainConfig, dataset: Dataset, *, palette: str = "red green blue"
) -> Model:
    """Has a vocabulary that it takes from a setting that it shares with `colours`."""
    lookup = layers.StringLookup(vocabulary=palette.split(), output_mode="one_hot")
    stack = [Input((), dtype="string"), lookup, layers.Dense(1)]
    return _compiled(Sequential(stack), config, loss="mse")


def unseeded(config: TrainConfig) -> Any:
    return tf.data.Dataset.from_tensor_slices(_table()).shuffle(50)


_SHUFFLED = tf.data.Dataset.from_tensor_slices(np.zeros((ROWS, 4))).enumerate().shuffle(20, seed=3)


def made_outside(config: TrainConfig) -> Any:
    return _SHUFFLED


def other_batches(config: TrainConfig) -> Any:
    return Batches(_table(), 5)


# Models.


def _compiled(model: Model, config: TrainConfig, **given: Any) -> Model:
    model.compile(optimizers.Adam(config.learning_rate), **given)
    return model


def _chain(config: TrainConfig, dataset: Dataset, *stack: Any, **given: Any) -> Model:
    """Returns a compiled model of these layers on the data's x."""
    return _compiled(Sequential([Input(dataset.spec[0].shape), *stack]), config, **given)


def regression(config: TrainConfig, dataset: Dataset) -> Model:
    stack = layers.Dense(8, activation="tanh"), layers.Dense(1)
    return _chain(config, dataset, *stack, loss="mse", metrics=["mae"], weighted_metrics=["mape"])


def stateful(config: TrainConfig, dataset: Dataset) -> Model:
    """Is made for a batch of 16 rows."""
    stack = [
        Input(batch_shape=(16, *dataset.spec[0].shape)),
        layers.SimpleRNN(4, stateful=True),
        layers.Dense(1),
    ]
    return _compiled(Sequential(stack), config, loss="mse")


def regularized(config: TrainConfig, dataset: Dataset) -> Model:
    """Has every kind of loss beside that of compile()."""
    hidden = layers.Dense(
        8,
        "tanh",
        kernel_regularizer=regularizers.L2(1e-2),
        bias_regularizer=regularizers.L1L2(1e-2),
    )
    last = layers.Dense(1, kernel_regularizer="l2", activity_regularizer="l2")
    return _chain(config, dataset, hidden, last, loss="mse", metrics=["mae"])


def uncompiled(config: TrainConfig, dataset: Dataset) -> Model:
    return Sequential([Input(dataset.spec[0].shape), layers.Dense(1)])


def without_loss(config: TrainConfig, dataset: Dataset) -> Model:
    return _chain(config, dataset, layers.Dense(1), metrics=["mae"])


def penalty_alone(config: TrainConfig, dataset: Dataset) -> Model:
    """Has no loss in compile(), but one of a layer, as a model trained by add_loss."""
    return _chain(config, dataset, layers.Dense(1, activity_regularizer="l2"))


def by_weight(config: TrainConfig, dataset: Dataset) -> Model:
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = regression(config, dataset)
    # Adam would hide a wrong factor
    model.compile(optimizers.SGD(0.1), loss=loss, metrics=["mae"])
    return model


def summed(config: TrainConfig, dataset: Dataset) -> Model:
    return _compiled(
        regression(config, dataset), config, loss=losses.MeanSquaredError(reduction="sum")
    )


def scalar_loss(config: TrainConfig, dataset: Dataset) -> Model:
    def loss(y: Any, found: Any) -> Any:
        return ops.mean(ops.square(ops.reshape(y, (-1, 1)) - found))

    return _compiled(regression(config, dataset), config, loss=loss)


def two_outputs(config: TrainConfig, dataset: Dataset) -> Model:
    inputs = {
        name: Input(spec.shape, dtype=spec.dtype.name, name=name)
        for name, spec in dataset.spec[0].items()
    }
    kind = layers.Flatten()(layers.Embedding(3, 2)(inputs["kind"]))
    hidden = layers.Dense(8, activation="tanh")(
        layers.Concatenate()([inputs["left"], inputs["right"], kind])
    )
    outputs = {
        "value": layers.Dense(1, name="value")(hidden),
        "positive": layers.Dense(1, activation="sigmoid", name="positive")(hidden),
    }
    return _compiled(
        Model(inputs, outputs),
        config,
        loss={"value": "mse", "positive": "binary_crossentropy"},
        metrics={"positive": ["accuracy", "auc"]},
    )


def segmenter(config: TrainConfig, dataset: Dataset) -> Model:
    hidden = layers.Conv2D(4, 3, padding="same", activation="relu")
    stack = (
        layers.Rescaling(1 / 255),
        hidden,
        layers.Conv2D(1, 1, activation="sigmoid"),
    )
    metrics = ["accuracy", keras.metrics.BinaryIoU(name="iou")]
    return _chain(config, dataset, *stack, loss="binary_crossentropy", metrics=metrics)


def multi_label(config: TrainConfig, dataset: Dataset) -> Model:
    # the last has a number for each label
    metrics = ["accuracy", "auc", keras.metrics.F1Score(threshold=0.5)]
    return _chain(
        config,
        dataset,
        layers.Dense(4, "sigmoid"),
        loss="binary_crossentropy",
        metrics=metrics,
    )


def classifier(config: TrainConfig, dataset: Dataset) -> Model:
    last = layers.Dense(4, activation="softmax")
    return _chain(
        config, dataset, last, loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )


def masked_text(config: TrainConfig, dataset: Dataset) -> Model:
    """Its loss has a mask of the embedding: a mean over the tokens that are there."""
    stack = [
        Input(dataset.spec[0].shape, dtype="int64"),
        layers.Embedding(20, 4, mask_zero=True),
        layers.LSTM(4, return_sequences=True),
        layers.Dense(20, activation="softmax"),
    ]
    return _compiled(Sequential(stack), config, loss="sparse_categorical_crossentropy")


def bag_of_words(config: TrainConfig, dataset: Dataset) -> Model:
    """Reads text by a vocabulary of its own; its layer loses the number of rows before the
    dropout."""
    vectorize = layers.TextVectorization(output_sequence_length=4)
    vectorize.adapt(["now win cash", "home see you"])
    stack = [
        Input((), dtype="string"),
        vectorize,
        layers.Embedding(8, 4),
        layers.GlobalAveragePooling1D(),
        layers.Dropout(0.2),
        layers.Dense(1),
    ]
    return _compiled(Sequential(stack), config, loss="mean_squared_error")


def next_tokens(config: TrainConfig) -> Any:
    x = tokens(config)[0]
    return x, np.roll(x, -1, axis=1)


class Autoencoder(Sequential):
    """Has a compute_loss, a test_step and a loss tracker of its own; test_step returns a plain
    value too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return ops.mean(ops.square(y_pred - x))

    def test_step(self, data: Any) -> dict[str, Any]:
        errors = ops.square(self(data) - data)
        self.tracker.update_state(ops.mean(errors, axis=1))
        return {"loss": self.tracker.result(), "largest": ops.max(errors)}


def autoencoder(config: TrainConfig, dataset: Dataset) -> Model:
    stack = [Input((4,)), layers.Dense(2), layers.Dense(4)]
    return _compiled(Autoencoder(stack), config)


def too_large_labels(config: TrainConfig) -> Any:
    return inputs_alone(config), np.arange(ROWS) % 5


def flat_classifier(config: TrainConfig, dataset: Dataset) -> Model:
    stack = layers.Flatten(), layers.Dense(4, activation="softmax")
    return _chain(config, dataset, *stack, loss="categorical_crossentropy")


def named_pair(config: TrainConfig) -> Any:
    return _and_first(*named_inputs(config))


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y: Any, found: Any, sample_weight: Any = None) -> None:
        error = ops.max(ops.abs(ops.reshape(y, (-1, 1)) - found))
        self.largest.assign(ops.maximum(self.largest, error))

    def result(self) -> Any:
        return self.largest + 0.0  # else `fit` gives what evaluation left in the variable


def largest_error(config: TrainConfig, dataset: Dataset) -> Model:
    return _compiled(regression(config, dataset), config, loss="mse", metrics=[Largest()])


class _Smoothed(keras.metrics.MeanAbsoluteError):
    """Assumes a row without error before any: its variables add up, but do not begin at 0."""

    def reset_state(self) -> None:
        super().reset_state()
        self.count.assign(1.0)


def smoothed(config: TrainConfig, dataset: Dataset) -> Model:
    return _compiled(regression(config, dataset), config, loss="mse", metrics=[_Smoothed()])
