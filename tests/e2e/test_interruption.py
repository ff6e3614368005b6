"""Tests that a run killed anywhere, any number of times, ends with the numbers of an undisturbed one.

`TRAINER_DRILL_KILLS=200 python -m pytest tests/e2e/test_interruption.py -m slow -k many -s` is the longer drill.
"""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from tests.drill import MOMENTS, RUN, Drill, finish, last_state, losses, numbers

KILLS = int(os.environ.get("TRAINER_DRILL_KILLS", "2"))
SEED = int(os.environ.get("TRAINER_DRILL_SEED", "0"))


def undisturbed(drill: Drill) -> Path:
    """Runs the same without a kill."""
    control = Drill(drill.folder.with_name("control"), drill.steps, 0, drill.workers, drill.replicas, drill.flags)
    control.run([])
    return control.folder


def check_same(one: Path, other: Path, *, tolerance: float = 0.0) -> None:
    """Compares weights, optimizers and stats.jsonl; `tolerance`: relative L2 of each tensor, 0 for bit for bit."""
    ours, theirs = last_state(one), last_state(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if tolerance:
            assert np.linalg.norm(value - theirs[name]) <= tolerance * max(float(np.linalg.norm(value)), 1e-6), name
        else:
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert numbers(one) == numbers(other)
    assert losses(one) == pytest.approx(losses(other), rel=1e-6)
    pictures = [{path.name: path.read_bytes() for path in folder.glob("samples/*")} for folder in (one, other)]
    assert pictures[0].keys() == pictures[1].keys()
    assert tolerance or pictures[0] == pictures[1]
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert [(result["state"], result["steps"]) for result in results] == [("done", results[1]["steps"])] * 2
    assert (one / "model" / "model.keras").is_file()
    assert not list(one.glob("checkpoints/.*"))


@pytest.mark.slow  # by SIGINT, and by SIGKILL in a bucket: test_task.py and test_storage_drill.py
def test_a_run_that_is_killed_many_times_ends_with_the_same_numbers(tmp_path: Path) -> None:
    drill = Drill(tmp_path / "drill", steps=30 * KILLS, seed=SEED)
    chance = random.Random(SEED)
    every = MOMENTS if len(MOMENTS) <= KILLS else ["saving, SIGKILL", "training, SIGTERM"]
    drill.run([*every, *(chance.choice(MOMENTS) for _ in range(KILLS - len(every)))])
    check_same(drill.folder, undisturbed(drill))
    result = json.loads((drill.folder / "result.json").read_text())
    assert sum(drill.kills.values()) == KILLS
    assert result["restarts"] <= KILLS
    print(
        f"\n{KILLS} kills: {dict(drill.kills)}, {drill.left_half_written} left a checkpoint half written; "
        f"{result['restarts']} restarts, {result['steps_repeated']} of {drill.steps} steps repeated"
    )


@pytest.mark.slow
def test_one_of_two_workers_is_killed(tmp_path: Path) -> None:
    drill = Drill(tmp_path / "drill", steps=60, seed=SEED, workers=(2,), flags=["--deterministic"])
    drill.run(["saving, SIGKILL"])
    check_same(drill.folder, undisturbed(drill))


@pytest.mark.slow  # on 1 and 2 replicas: tests/trainer/run/test_job.py
def test_every_life_on_another_number_of_workers(tmp_path: Path) -> None:
    flags = ["--precision=float64", "--sample_every_steps=0"]
    drill = Drill(tmp_path / "drill", steps=60, seed=SEED, flags=flags, workers=(2, 1))
    drill.run(["training, SIGTERM"])
    control = tmp_path / "control"
    finish([*RUN, f"--job_dir={control}", "--steps=60", *flags], control.with_suffix(".log"))
    check_same(drill.folder, control, tolerance=1e-10)
