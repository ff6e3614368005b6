"""Tests how much time is lost for input: queues with a known answer, simulated, on a CPU and on a
GPU."""

import numpy as np
import pytest

from tests.fixtures import SLOW, parametrize
from tests.workers import python
from trainer.training.steps import input_wait


def simulated(
    steps: int, produce: float, start: float, compute: float, *, runs_ahead: bool
) -> tuple[np.ndarray, ...]:
    """Returns when the host asked and had each batch, and when all is done.

    produce, start, compute: the seconds in which a batch is made, a step's operations are started,
    and computed.
    """
    asked = []
    ready = []
    now = 0.0
    made = 0.0
    device = 0.0
    for _ in range(steps):
        asked.append(now)
        made += produce
        ready.append(max(now, made))
        now = ready[-1] + start
        device = max(max(ready[-1], device) + compute, now)
        now = now if runs_ahead else device
    return np.array(asked), np.array(ready), np.array(device)


@parametrize("runs_ahead", [False, True])
@parametrize(
    "produce, start, compute",
    [
        (0.020, 0.001, 0.030),
        (0.030, 0.001, 0.020),
        (0.050, 0.010, 0.001),
        (0.001, 0.030, 0.020),
        (0.0, 0.001, 0.02),
    ],
)
def test_the_time_lost_is_what_a_run_with_batches_at_once_would_save(
    produce: float, start: float, compute: float, runs_ahead: bool
) -> None:
    """On a GPU that is the limit, the host waits for each batch and loses nothing but the first."""
    asked, ready, end = simulated(50, produce, start, compute, runs_ahead=runs_ahead)
    without = simulated(50, 0.0, start, compute, runs_ahead=runs_ahead)[-1]
    found = input_wait(asked + 1e9, ready + 1e9, float(end) + 1e9, runs_ahead=runs_ahead)
    assert found == pytest.approx(float(end - without), abs=2e-3)
    if runs_ahead and start < produce < compute:
        assert found < 0.05 * end < 0.5 * end < np.sum(ready - asked)


@parametrize("runs_ahead", [False, True])
def test_a_call_of_one_step_loses_its_wait(runs_ahead: bool) -> None:
    assert input_wait(
        np.array([1.0]), np.array([1.5]), 2.5, runs_ahead=runs_ahead
    ) == pytest.approx(0.5)
    # the clock was set back
    assert input_wait(np.array([1.0]), np.array([0.9]), 2.5, runs_ahead=runs_ahead) == 0.0
    assert input_wait(np.array([5.0]), np.array([7.0]), 4.0, runs_ahead=runs_ahead) == 0.0


@SLOW
def test_the_time_is_known_when_tensorflow_is_deterministic() -> None:
    """In a process of its own: determinism cannot be ended. TensorFlow's own operation fails
    then."""
    code = (
        "import tensorflow as tf, time\n"
        "from trainer.training.steps import timestamp\n"
        "tf.config.experimental.enable_op_determinism()\n"
        "before = time.time()\n"
        "print(before <= float(tf.function(lambda: timestamp(tf.constant(1)))()) <= time.time())\n"
    )
    assert python("-c", code).stdout == "True\n"
