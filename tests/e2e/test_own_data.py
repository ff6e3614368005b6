"""Tests that two workers with data of a user's own, killed and started again, give the numbers of one process."""

from pathlib import Path

import pytest

from tests.drill import Drill, last_state, losses
from tests.support import largest_difference


@pytest.mark.slow
def test_two_workers_killed_on_the_way_give_the_numbers_of_one(tmp_path: Path) -> None:
    flags = ["--model=tests.own_data:regression", "--data=tests.own_data:tf_examples", "--precision=float64"]
    flags += ["--global_batch_size=16", "--steps_per_loop=3", "--checkpoint_every_steps=30", "--report_every_steps=30"]
    drill = Drill(tmp_path / "drill", steps=450, seed=1, workers=(2, 2, 1), flags=flags)
    drill.run(["training, SIGKILL", "training, SIGTERM"])
    control = Drill(tmp_path / "control", steps=450, seed=1, flags=flags)
    control.run([])
    one, other = last_state(drill.folder), last_state(control.folder)
    assert largest_difference(one, other) < 1e-10
    assert losses(drill.folder) == pytest.approx(losses(control.folder), rel=1e-7)
    assert sum(drill.kills.values()) == 2
