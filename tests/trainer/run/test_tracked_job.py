"""Tests trainings that a tracker follows: interrupted and resumed, gone back after a NaN, failed,
refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.drill import lines, read
from tests.fixtures import Make, Patch
from tests.support import refused
from tests.support import run_job as run
from trainer.base.errors import UserError
from trainer.base.tracker import Opened, Point, TrackedRun, TrackerAddress

TRACK = f"--track={__name__}:tracker#x"
Points = list[tuple[str, int, float]]


@dataclass
class Kept:
    """Keeps what it gets, of each run. Meets `Tracker`."""

    points: dict[str, Points] = field(default_factory=dict)
    runs: list[TrackedRun] = field(default_factory=list)
    refusal: str = ""

    def begin(self, run: TrackedRun) -> Opened:
        if self.refusal:
            raise UserError(self.refusal)
        last = {name: step for name, step, _ in self.points.setdefault(run.id, [])}
        return Opened("", lambda name: last.get(name, -1))

    def send(self, run: TrackedRun, points: Sequence[Point]) -> None:
        self.runs.append(run)
        self.points[run.id] += [
            (name, point.step, value) for point in points for name, value in point.values.items()
        ]


@pytest.fixture
def kept(monkeypatch: Patch) -> Kept:
    known = Kept()
    monkeypatch.setattr(f"{__name__}.tracker", lambda address: known, raising=False)
    return known


def losses(known: Points) -> list[tuple[int, float]]:
    return [(step, value) for name, step, value in known if name == "loss"]


def in_file(folder: Path) -> list[tuple[int, float]]:
    return [(entry["step"], entry["losses"]["loss"]) for entry in lines(folder, "report")]


def test_restarts_on_more_replicas_go_on_with_the_same_run(kept: Kept, small_config: Make) -> None:
    flags = ("--model=mlp", "--report_every_steps=1", "--checkpoint_every_steps=2", TRACK)
    folder = run(small_config(*flags, "--steps=3"))
    run(small_config(*flags, "--steps=6", "--replicas=2"))
    run(small_config(*flags, "--steps=6", "--replicas=2"))  # it has nothing to do
    [points] = kept.points.values()
    assert losses(points) == in_file(folder)
    assert [step for step, _ in losses(points)] == [1, 2, 3, 4, 5, 6]
    last = kept.runs[-1]
    assert (last.state, last.id, last.parameters["replicas"]) == (
        "finished",
        read(folder / "run.json")["id"],
        "2",
    )
    assert last.tags["data_fingerprint"]


def test_a_refusal_ends_the_run_before_training(kept: Kept, small_config: Make) -> None:
    kept.refusal = "track=x: the server refuses it (401)"
    config = small_config("--model=mlp", "--steps=3", TRACK)
    with refused("refuses it (401)"):
        run(config)
    result = read(Path(config.job_dir) / "result.json")
    assert (result["state"], result["error"]) == ("failed", kept.refusal)
    assert lines(Path(config.job_dir), "report") == []


def test_a_new_start_with_other_settings_after_a_failure_is_another_run(
    kept: Kept, small_config: Make
) -> None:
    flags = ("--model=tests.models:diverging", "--steps=6", "--checkpoint_every_steps=0", TRACK)
    for rate in ("0.1", "0.1", "0.2"):
        with refused("NaN"):
            run(small_config(*flags, f"--learning_rate={rate}"))
    assert len(kept.points) == 2
    assert (kept.runs[-1].state, "NaN" in kept.runs[-1].tags["error"]) == ("failed", True)


def tracker(address: TrackerAddress) -> Any:
    """Is replaced by `kept`."""
