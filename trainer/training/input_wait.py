"""Measures how long the loop over steps lost because its next batch was not there."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Times = npt.NDArray[np.float64]


def timestamp(after: Any) -> Any:
    """Returns when, in seconds of the host's clock, all tensors of the nest `after` are there."""
    with tf.control_dependencies(tf.nest.flatten(after, expand_composites=True)), tf.device("CPU:0"):
        return (
            tf.timestamp() if _allows_timestamps() else tf.ensure_shape(tf.numpy_function(time.time, [], "double"), ())
        )


def _allows_timestamps() -> bool:
    """Returns whether TensorFlow runs its own operation for the time, which it refuses once it is deterministic."""
    with tf.init_scope():
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return False
    return True


def input_wait(asked: Times, ready: Times, end: float, *, runs_ahead: bool) -> float:
    """Returns the seconds by which the steps of a call would have ended earlier, had each batch been there at once.

    `asked` and `ready`, (steps,), in seconds of the host's clock: when the host asked for each batch, and when it had
    it. `end`: when the last step was done. A CPU finishes a step before it asks for the next batch, so the sum of
    all waits is lost. With `runs_ahead`, on a GPU, the host asks for batches while the device still works on earlier
    steps, and time is lost only while the device is idle. The device's time for a step is not measured: all steps are
    taken to need the same time, and it is the longest with which every step can be done at `end`. A step begins once
    its batch is there and the step before it is done, and ends no earlier than the host has started its operations.
    """
    if not len(asked):
        return 0.0
    waits = np.maximum(ready - asked, 0.0)
    lost = float(min(np.sum(waits), end - asked[0]))
    if not runs_ahead:
        return max(lost, 0.0)
    started = np.append(asked[1:], ready[-1])  # all operations of each step; of the last one it is not known
    left = np.arange(len(asked), 0, -1.0)  # steps from each one to the last
    device = np.min([*(end - ready) / left, *(end - started[:-1]) / (left[:-1] - 1)])
    lost_before = np.cumsum(waits)
    without = np.max([ready - lost_before + left * device, started - lost_before + (left - 1) * device])
    return float(np.clip(end - without, 0.0, max(lost, 0.0)))
