"""Tests the profiles of real runs, and when none is made."""

from pathlib import Path

import tensorflow as tf

from tests.fixtures import Log, parametrize
from tests.support import refused, resolved, run_job
from trainer.invariance.internals import parse_profile

BATCHES = 24  # of an epoch


def trained(folder: Path, *flags: str) -> Path:
    own = [
        "--model=tests.own_data:regression",
        "--data=tests.own_data:more",
        f"--rows={16 * BATCHES}",
    ]
    return run_job(
        resolved(
            *own, f"--job_dir={folder}", "--global_batch_size=16", "--report_every_steps=10", *flags
        )
    )


def steps_in(folder: Path) -> list[set[int]]:
    """Returns the first step (from 0) of each call that a profile of the run holds, of each
    profile."""
    return [
        {
            stat.int64_value
            for plane in parse_profile(file.read_bytes()).planes
            for line in plane.lines
            for event in line.events
            if plane.event_metadata[event.metadata_id].name == "train"
            for stat in event.stats
            if plane.stat_metadata[stat.metadata_id].name == "step_num"
        }
        # where TensorBoard looks for it
        for file in folder.glob("logs/plugins/profile/*/*.xplane.pb")
    ]


def test_the_profile_of_the_steps_is_in_the_logs_of_a_run_and_made_once(
    tmp_path: Path, caplog: Log
) -> None:
    """One whose steps the first call of a process holds, which builds the graph, is not made; the
    line says so."""
    flags = ("--profile_steps=2..3", "--checkpoint_every_steps=6")
    trained(tmp_path, *flags, "--steps=6")
    (steps,) = steps_in(tmp_path)
    assert min(steps) == 1
    assert max(steps) <= 2
    trained(tmp_path, *flags, "--steps=9")
    assert steps_in(tmp_path) == [steps]
    assert "profile_steps" not in caplog.text
    trained(tmp_path, "--profile_steps=10..12", "--steps=14")
    assert steps_in(tmp_path) == [steps]
    assert "profile_steps: the run starts at step 9" in caplog.text


def test_a_run_that_ends_within_the_steps_has_a_profile_of_those_before(tmp_path: Path) -> None:
    (steps,) = steps_in(trained(tmp_path, "--profile_steps=4..50", "--epochs=1"))
    assert (min(steps), max(steps) < BATCHES) == (3, True)


def test_another_profiler_that_runs_is_left_alone(tmp_path: Path, caplog: Log) -> None:
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        assert steps_in(trained(tmp_path / "run", "--profile_steps=4..5", "--steps=6")) == []
    finally:
        tf.profiler.experimental.stop()
    assert "profile_steps: TensorFlow's profiler cannot start" in caplog.text


@parametrize(
    "steps, line",
    [
        (
            "1..5",
            (
                "profile_steps=1..5: write it as 100..110 (first step..last step): 1 to 100 steps,"
                " from"
            ),
        ),
        ("100..200", "1 to 100 steps"),
        ("18..21", "profile_steps=18..21, but the run ends at step 20: take earlier ones"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(steps: str, line: str) -> None:
    with refused(line):
        resolved("--recipe=wgan_gp_digits", "--steps=20", f"--profile_steps={steps}")
