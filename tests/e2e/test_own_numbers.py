"""Tests that own models and data give the same numbers on two workers with two replicas each as on one device.

Alone each run ends on the way and goes on from its checkpoint; the workers run without a break.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import workers
from tests.own_runs import CASES, settings
from tests.support import largest_difference

Numbers = Callable[[str], tuple[dict[str, Any], ...]]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Returns weights and losses of a case, alone and on workers."""
    alone, several = (tmp_path_factory.mktemp(name) for name in ("alone", "several"))
    for folder, count, more in ((alone, 1, ["1", "--restart"]), (several, 2, ["2"])):
        codes = workers.run(count, [str(folder), *more], folder / "log", module="tests.own_runs", seconds=1200)
        assert codes == [0] * count, [log.read_text()[-3000:] for log in folder.glob("log.*")]
    return lambda case: tuple(dict(np.load(folder / f"{case}.npz")) for folder in (alone, several))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_workers_with_two_replicas_give_the_numbers_of_one_device_that_was_restarted(
    case: str, numbers: Numbers
) -> None:
    one, other = numbers(case)
    # Adam moves a weight without effect, as the bias of an attention's keys, by rounding alone.
    assert largest_difference(one, other, smallest_norm=settings(case).learning_rate) < 1e-10
