"""Tests that published examples of keras.io train on two replicas with the numbers of one, or why
they cannot."""

from pathlib import Path

import pytest

from tests.fixtures import SLOW, Patch, parametrize
from tests.support import refused, resolved, run_job
from trainer.base.run_files.job_files import read_stats
from trainer.base.settings.train_config import TrainConfig
from trainer.run import replica_check

REFUSED = (
    "run a loop that reads values by NumPy as a script, on the same machines (docs/any_script.md)"
)
# Has callbacks and rows for evaluation too.
SERIES = "timeseries_classification_from_scratch"


def settings(name: str, *more: str) -> TrainConfig:
    """Returns the settings of an example's few steps of a small batch."""
    module = f"tests.keras_io.{name}"
    return resolved(
        f"--model={module}:build",
        f"--data={module}:data",
        "--global_batch_size=4",
        "--steps=2",
        *more,
    )


@SLOW  # quick ones, of our examples: tests/test_examples.py
@parametrize("name", ["conditional_gan", SERIES])
def test_an_example_trains_on_two_replicas_with_the_numbers_of_one(
    name: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(replica_check, "COMPARED_STEPS", 2)
    assert replica_check.compare_replicas(settings(name)) == ([], [], "in float64")


@SLOW
def test_an_example_whose_numbers_are_of_a_whole_batch_is_told(monkeypatch: Patch) -> None:
    monkeypatch.setattr(replica_check, "COMPARED_STEPS", 1)
    problems, *_ = replica_check.compare_replicas(settings("collaborative_filtering_movielens"))
    assert "loss is " in problems[-1]
    assert all("twice as large" not in line for line in problems)


def test_an_example_with_a_loop_of_its_own_is_refused() -> None:
    with refused(REFUSED):
        replica_check.compare_replicas(settings("reptile"))


# A subclassed model of several networks, callbacks, no get_config.
@SLOW
@parametrize(
    "name, loss",
    [
        ("conditional_gan", "g_loss"),
        (SERIES, "loss"),
        ("collaborative_filtering_movielens", "loss"),
    ],
)
@pytest.mark.exports
def test_a_whole_job_runs_and_saves_its_model(name: str, loss: str, tmp_path: Path) -> None:
    more = [f"--callbacks=tests.keras_io.{SERIES}:callbacks"] * (name == SERIES)
    job_dir = run_job(settings(name, f"--job_dir={tmp_path}", "--replicas=2", *more))
    *_, entry = (entry for entry in read_stats(job_dir)[0] if entry["kind"] == "report")
    assert entry["step"] == 2
    assert loss in entry["losses"]
    assert (job_dir / "model" / "saved_model").is_dir()
