"""Callbacks as users of `fit` write them; each appends what it saw to SEEN. One model, and rows
that are all equal."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from keras import (
    Input,
    Model,
    Sequential,
    callbacks,
    initializers,
    layers,
    metrics,
    ops,
    optimizers,
)
from numpy.random import default_rng

SEEN: dict[str, list[Any]] = {}
STEPS_PER_EPOCH = 5
EPOCHS = 3
BATCH = 8


def see(name: str, *values: Any) -> None:
    SEEN.setdefault(name, []).append(values)


def rows(count: int = STEPS_PER_EPOCH * BATCH) -> tuple[Any, Any]:
    """Equal rows: their order, which is another one in `fit`, changes nothing."""
    return np.tile([[1.0, -2.0, 0.5]], (count, 1)), np.full((count, 1), 3.0)


class Level(metrics.Metric):
    """Returns its variable, as the guide of Keras does."""

    def __init__(self) -> None:
        super().__init__(name="level")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(y_true))

    def result(self) -> Any:
        return self.total


def build(config: Any = None, dataset: Any = None) -> Model:
    ones = initializers.Constant(0.1)
    parts = [
        Input((3,)),
        layers.Dense(2, kernel_initializer=ones),
        layers.Dense(1),
    ]
    parts[2].kernel_initializer = ones
    model = Sequential(parts)
    model.compile(optimizers.SGD(0.01, momentum=0.5), "mse", metrics=["mae", Level()])
    return model


def data(config: Any) -> Any:
    return rows(), rows(4)


class WarmUp(callbacks.Callback):
    """Sets the rate before each step, by a count of its own."""

    steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.model.optimizer.learning_rate = 0.01 * min(1.0, self.steps / 7)
        see("warm_up", batch, float(self.model.optimizer.learning_rate))


class OneCycle(callbacks.Callback):
    """Sets the rate after each step, by the optimizer's count and the batch in the epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = int(self.model.optimizer.iterations)
        rate = 0.02 * math.sin(math.pi * (done + 1) / (STEPS_PER_EPOCH * EPOCHS + 2))
        self.model.optimizer.learning_rate.assign(rate)
        see("one_cycle", batch, done, rate)


class OldNames(callbacks.Callback):
    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        see("old_begin", batch)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        see("old_end", batch, logs["loss"], logs["mae"])


class WeightLog(callbacks.Callback):
    """Reads variables in every way."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        kernel = self.model.layers[0].kernel
        means = (
            float(np.mean(kernel.numpy())),
            float(np.mean(np.array(kernel))),
            float(ops.mean(kernel)),
        )
        see("weights", *means, float(self.model.optimizer.momentums[0].numpy().sum()))


class SaveBest(callbacks.Callback):
    """Saves and loads weights by files of its own."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.save_weights(path := str(FOLDER / "best.weights.h5"))
        self.model.load_weights(path)
        # `fit` gives what evaluation left in the variable.
        assert float(logs["level"]) in (3.0 * 4, 3.0 * STEPS_PER_EPOCH * BATCH)
        see(
            "epochs", epoch, *(float(logs[name]) for name in ("loss", "mae", "val_loss", "val_mae"))
        )


class FloatOfAll(callbacks.Callback):
    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        weights = [float(weight[0]) for weight in self.model.weights if len(weight.shape) == 1]
        see(
            "floats",
            float(optimizer.learning_rate),
            float(optimizer.iterations),
            *weights,
            *map(float, logs.values()),
        )


class BestInMemory(callbacks.Callback):
    best = math.inf

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs["gap"] < self.best:
            self.best, self.weights = logs["gap"], self.model.get_weights()

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.weights)
        see("best", self.best, *(float(weight.sum()) for weight in self.model.get_weights()))


class OfEvaluation(callbacks.Callback):
    def on_test_begin(self, logs: Any = None) -> None:
        see("test_begin", float(self.model.optimizer.iterations))

    def on_test_end(self, logs: Any = None) -> None:
        see("test_end", logs["loss"], logs["mae"])


class Answers(callbacks.Callback):
    """Evaluates and predicts rows of its own, of which no batch is as large as the next."""

    x = default_rng(0).normal(size=(7, 3))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        heard = []
        hook = callbacks.LambdaCallback(on_test_end=lambda logs: heard.append(logs["mae"]))
        model = Model(self.model.inputs, {"answer": self.model.outputs[0]})
        found = self.model.evaluate(
            self.x, self.x[:, :1], 3, verbose=0, callbacks=[hook], return_dict=True
        )
        first = self.model.evaluate(self.x, self.x[:, :1], 3, verbose=0, steps=1)
        answers = (
            self.model.predict(self.x, batch_size=3, verbose=0),
            model.predict(self.x, verbose=0)["answer"],
        )
        see(
            "answers",
            *first[:2],
            found["loss"],
            found["mae"],
            *heard,
            *(float(part.sum()) for part in answers),
        )


class StopByBatch(callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        see("stop", batch)
        if int(self.model.optimizer.iterations) == 8:
            self.model.stop_training = True


FOLDER = Path()


def stop_by_batch() -> list[callbacks.Callback]:
    return [StopByBatch()]


def by_epoch() -> list[callbacks.Callback]:
    """Callbacks that lose nothing when a call to the device has several steps."""
    return [
        callbacks.ModelCheckpoint(str(FOLDER / "model.keras")),
        callbacks.TerminateOnNaN(),
        callbacks.ReduceLROnPlateau("loss", patience=1),
        callbacks.EarlyStopping("loss"),
        callbacks.LambdaCallback(  # a value that later callbacks and the history have too
            on_epoch_end=lambda epoch, logs: logs.update(
                gap=float(logs["val_loss"]) - float(logs["loss"])
            )
        ),
        BestInMemory(),
        OfEvaluation(),
        Answers(),
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: see("lambda_epoch", epoch)),
    ]


def all_kinds() -> list[callbacks.Callback]:
    def scheduled(epoch: int, rate: float) -> float:
        see("scheduled", epoch, rate)
        return rate * 0.9

    return [
        WarmUp(),
        OneCycle(),
        OldNames(),
        WeightLog(),
        SaveBest(),
        FloatOfAll(),
        callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: see("lambda", batch, logs["loss"])
        ),
        callbacks.LearningRateScheduler(scheduled),
        callbacks.ModelCheckpoint(
            str(FOLDER / "often.weights.h5"), save_weights_only=True, save_freq=2
        ),
        callbacks.CSVLogger(str(FOLDER / "log.csv")),
    ]


class OfTestBatches(callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None: ...


def of_test_batches() -> list[callbacks.Callback]:
    return [OfTestBatches()]
