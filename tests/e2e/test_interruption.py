"""Tests that a run killed anywhere, any number of times, ends with the numbers of an undisturbed
one.

`TRAINER_DRILL_KILLS=200 python -m pytest tests/e2e/test_interruption.py -m slow -k many -s` is the
longer drill.
"""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.drill import MOMENTS, drill, last_state, losses, numbers, read
from tests.fixtures import SLOW

KILLS = int(os.environ.get("TRAINER_DRILL_KILLS", "2"))
SEED = int(os.environ.get("TRAINER_DRILL_SEED", "0"))


def check_same(one: Path, other: Path, *, tolerance: float = 0.0) -> None:
    """Compares weights, optimizers and stats.jsonl; `tolerance`: relative L2 of each tensor, 0 for
    bit for bit."""
    ours = last_state(one)
    theirs = last_state(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if tolerance:
            assert np.linalg.norm(value - theirs[name]) <= tolerance * max(
                float(np.linalg.norm(value)), 1e-6
            ), name
        else:
            assert_array_equal(value, theirs[name], err_msg=name)
    assert numbers(one) == numbers(other)
    assert losses(one) == pytest.approx(losses(other), rel=1e-6)
    pictures = [
        {path.name: path.read_bytes() for path in folder.glob("samples/*")}
        for folder in (one, other)
    ]
    assert pictures[0].keys() == pictures[1].keys()
    assert tolerance or pictures[0] == pictures[1]
    first, second = (read(folder / "result.json") for folder in (one, other))
    assert (first["state"], second["state"], first["steps"]) == ("done", "done", second["steps"])
    assert (one / "model" / "model.keras").is_file()
    assert not list(one.glob("checkpoints/.*"))


@SLOW  # by SIGINT, and by SIGKILL in a bucket: test_task.py and test_storage_drill.py
def test_a_run_that_is_killed_many_times_ends_with_the_same_numbers(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    steps = 30 * KILLS
    every = MOMENTS if len(MOMENTS) <= KILLS else ["saving, SIGKILL", "training, SIGTERM"]
    drill(
        tmp_path / "drill",
        steps,
        [*every, *(chance.choice(MOMENTS) for _ in range(KILLS - len(every)))],
        SEED,
    )
    drill(tmp_path / "control", steps, [], SEED)
    check_same(tmp_path / "drill", tmp_path / "control")
    result = read(tmp_path / "drill" / "result.json")
    assert result["restarts"] <= KILLS
    print(
        f"\n{KILLS} kills: {result['restarts']} restarts, {result['steps_repeated']} of {steps}"
        " steps repeated"
    )


@SLOW
def test_one_of_two_workers_is_killed(tmp_path: Path) -> None:
    for name, kills in (("drill", ["saving, SIGKILL"]), ("control", [])):
        drill(tmp_path / name, 60, kills, SEED, count=(2,), flags=["--deterministic"])
    check_same(tmp_path / "drill", tmp_path / "control")
