"""Calls to the device are cut at boundaries, sized by time, and tell Keras callbacks what was
reached."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
from keras import Model

from tests.fixtures import parametrize
from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import make_replicas
from trainer.reporting.progress import Progress, StepLogs
from trainer.training.loop import CallSize, Control, Hook, TrainingLoop
from trainer.training.signals import StopRequest


class Steps:
    """Stands in for the device: notes each call; its loss at step s is s, or NaN at `nan_at`."""

    def __init__(self, nan_at: int | None = None, stop_at: int | None = None):
        self.calls: list[tuple[int, int]] = []
        self.nan_at = nan_at
        self.stop_at = stop_at
        self.model = Model()
        self.model.stop_training = False

    def __call__(self, iterator: Any, first_step: int, count: int) -> StepLogs:
        self.calls.append((first_step, count))
        values = np.arange(first_step, first_step + count, dtype=np.float64)[:, None] + 1
        if self.nan_at is not None:
            values[values == self.nan_at] = np.nan
        self.model.stop_training = self.stop_at is not None and first_step + count >= self.stop_at
        return StepLogs(("loss",), values, {})


def run(
    steps: Any,
    total: int,
    hooks: list[Hook],
    first: int = 0,
    most_steps: int = 0,
    control: Control | None = None,
) -> Progress:
    progress = Progress(first, total, steps_per_epoch=10, examples_per_step=8)
    callbacks = keras.callbacks.CallbackList([], model=steps.model)
    control = Control(make_replicas(TrainConfig()), StopRequest()) if control is None else control
    loop = TrainingLoop(steps.model, progress, hooks, callbacks, control)
    loop.train(CallSize(most_steps), partial(steps, None), lambda: None, lambda logs: {})
    return progress


def at(seen: list[int]) -> Callable[[Progress], None]:
    return lambda progress: seen.append(progress.step)


def test_hooks_run_at_their_steps_and_at_the_end() -> None:
    seven = []
    four = []
    end = []
    epochs = []
    hooks = [
        Hook(7, at(seven)),
        Hook(4, at(four)),
        Hook(0, at(end), cuts=(2, 5)),
        Hook(10, at(epochs), at_end=False),
    ]
    steps = Steps()
    run(steps, 25, hooks, most_steps=3)
    assert (seven, four, end, epochs) == (
        [7, 14, 21, 25],
        [4, 8, 12, 16, 20, 24, 25],
        [25],
        [10, 20],
    )
    assert {0, 2, 5} <= {first for first, _ in steps.calls}
    assert [first for first, _ in steps.calls] == np.cumsum(
        [0] + [count for _, count in steps.calls]
    )[:-1].tolist()
    assert (sum(count for _, count in steps.calls), max(count for _, count in steps.calls)) == (
        25,
        3,
    )
    del seven[:]
    run(Steps(), 25, hooks[:1], first=13)  # a resumed run
    assert seven == [14, 21, 25]


def test_calls_grow_by_doubling_until_they_last_as_long_as_they_may() -> None:
    size = CallSize(most_steps=0, most_seconds=3.0)
    seconds_a_step = 0.1
    sizes = []
    for _ in range(10):
        sizes.append(size(10_000))
        size.learn(sizes[-1], sizes[-1] * seconds_a_step)
    assert sizes == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]
    size.learn(2, 2 * seconds_a_step)  # cut short by a boundary
    assert size(10_000) == 30
    size.learn(30, 30 * 1.0)  # the machine became ten times slower
    assert size(10_000) == 3
    size.learn(3, 60.0)
    assert (size(10_000), CallSize(5)(10_000)) == (1, 1)


def test_nan_names_the_step_and_what_is_broken() -> None:
    with pytest.raises(UserError, match=r"^step 17: loss is NaN or infinite"):
        run(Steps(nan_at=17), 100, [Hook(0, at([]))])


@parametrize(
    "names, stopped",
    [(("loss", "recall"), "loss"), (("recall", "critic_loss"), ""), (("recall", "elbo"), "recall")],
)
def test_a_metric_may_be_nan_beside_a_loss(names: tuple[str, ...], stopped: str) -> None:
    logs = StepLogs(names, np.array([[1.0, 1.0], [np.nan, 1.0]]), {})
    assert logs.first_not_finite() == ((1, [stopped]) if stopped else None)


def test_stop_training_ends_the_run_with_the_last_hooks_once() -> None:
    every = []
    end = []
    progress = run(Steps(stop_at=4), 100, [Hook(2, at(every)), Hook(0, at(end))], most_steps=1)
    assert (progress.step, progress.finished) == (4, True)
    assert (every, end) == ([2, 4], [4])


def test_a_signal_in_the_midst_of_a_measurement_leaves_it_and_what_comes_after() -> None:
    stop = StopRequest()
    seen = []
    after = []
    control = Control(make_replicas(TrainConfig()), stop)
    watched = control.watched()

    def measure(progress: Progress) -> None:
        seen.append("begun")
        if progress.step == 4:
            stop.signal = "SIGTERM"
        watched.sum_over_workers(0)
        seen.append("done")

    progress = run(Steps(), 10, [Hook(2, measure), Hook(2, at(after))], control=control)
    assert (progress.step, control.signal) == (4, "SIGTERM")
    assert (seen, after) == (["begun", "done", "begun"], [2])


class Worker:
    """Stands in for the replicas of one of two workers: threads that wait for each other at every
    sum."""

    barrier = threading.Barrier(2, timeout=10)
    values: ClassVar[dict[int, Any]] = {}

    def __init__(self, index: int):
        self.cluster = Cluster(("one:1", "other:1"), index)

    def sum_over_workers(self, values: Any) -> Any:
        self.values[self.cluster.index] = np.asarray(values, np.float64)
        self.barrier.wait()
        total = self.values[0] + self.values[1]
        self.barrier.wait()
        return total


def test_a_callback_that_stops_one_worker_stops_all_at_that_step() -> None:
    def worker(index: int) -> int:
        replicas: Any = Worker(index)
        control = Control(replicas, StopRequest())
        steps = Steps(stop_at=4 if index == 1 else None)
        return run(steps, 100, [Hook(0, at([]))], most_steps=1, control=control).step

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(worker, range(2))) == [4, 4]
