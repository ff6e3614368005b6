"""Tests reading job directories: whole, damaged and resumed."""

import json
from pathlib import Path

import pytest

from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.report.run_reader import RunRecord, after_warm_up
from deploy.report.table import notes
from deploy.report.verdict import verdict
from tests.deploy.planted import edit, plant
from tests.fixtures import Json


@pytest.mark.parametrize(("steps", "shown"), [(35, 35), (None, 30)])
def test_steps_are_those_of_the_result_or_of_the_last_report(steps: int | None, shown: int) -> None:
    """A run that is stopped ends between two reports; one that was killed has no result."""
    folder = plant("a", [0.2, 0.1, 0.1], devices=("GPU:0", "GPU:1"), fid=12.5)
    edit(folder / "result.json", steps=steps)
    run = RunRecord(folder)
    assert run.state == "done"
    assert run.steps == shown
    assert run.steps_per_epoch == 60
    assert [line.step for line in run.reports] == [10, 20, 30]
    assert run.final == {"loss": pytest.approx(1 / 3), "accuracy": 0.9, "fid": 12.5}


@pytest.mark.parametrize(
    ("jobs", "seconds", "usd"),
    [
        ({"7": {"seconds": 60, "usd": 0.25}, "8": {"seconds": 30, "usd": 0.5}}, 90, 0.75),
        ({"7": {"seconds": 60, "usd": 0.25}, "8": {"seconds": 30, "usd": None}}, 90, None),
        ({"7": "damaged"}, None, None),
        ({}, None, None),
    ],
)
def test_the_bill_of_all_jobs_is_known_or_unknown_as_a_whole(
    jobs: Json, seconds: float | None, usd: float | None
) -> None:
    Path("billed.json").write_text(json.dumps({"jobs": jobs}))
    assert RunRecord(Path()).billed_seconds == seconds
    assert RunRecord(Path()).billed_usd == usd


def test_damaged_lines_are_left_out_and_counted() -> None:
    folder = plant("a", [0.2, 0.1, 0.1])
    good = (folder / "stats.jsonl").read_text()
    bad = (
        '{"kind": "report", "st\n[1]\nnull\n{"kind": 3, "step": 1}\n{"kind": "report", "step":'
        ' "x"}\n\xff\n' + "[" * 9000 + '\n{"kind": "report", "step": 5, "step_seconds": "fast"}'
    )
    (folder / "stats.jsonl").write_text(bad + "\n" + good)
    run = RunRecord(folder)
    assert [line.step for line in run.reports] == [10, 20, 30]
    assert "damaged lines of stats.jsonl are left out: 8" in run.problems[0]
    (folder / "stats.jsonl").write_text("{\n" + good)
    assert "damaged lines of stats.jsonl are left out: 1" in RunRecord(folder).problems[0]


def test_a_run_without_an_end_is_reported() -> None:
    folder = plant("a", [0.2, 0.1, 0.1], state="running")
    ending = "it has not ended, or was killed (last report: step 30)"
    collection = collect(["."])
    rows = summarize(collection)
    assert f"a: {ending}." in verdict(collection, rows)
    assert rows[0].missing[0] == ending
    (folder / "stats.jsonl").unlink()
    assert RunRecord(folder).ending == "it has not ended, or was killed (no report)"
    (folder / "result.json").unlink()
    collection = collect(["."])
    assert "a: result.json is missing." in verdict(collection, summarize(collection))


@pytest.mark.parametrize("content", ["", "{", "null", "\xff", "{" * 5000])
def test_damaged_files_cost_only_their_own_values(content: str) -> None:
    folder = plant("a", [0.2, 0.1, 0.1])
    (folder / "result.json").write_text(content, encoding="latin-1")
    run = RunRecord(folder)
    assert run.state == "unknown"
    assert run.wall_seconds is None
    assert run.steps_per_epoch == 60
    assert run.ending == "result.json is damaged"
    assert summarize(collect([str(folder)]))[0].missing[0] == "result.json is damaged"
    assert run.final == {"loss": pytest.approx(1 / 3), "accuracy": 0.9}  # the newest report's
    assert len(run.problems) == 1


def test_the_first_report_after_a_restart_is_warm_up() -> None:
    folder = plant("a", [9.0, 0.1, 0.1, 9.0, 0.3])
    lines = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    entries = [
        {**line, "untimed_steps": count} for line, count in zip(lines, (1, 0, 0, 1, 0), strict=True)
    ]
    (folder / "stats.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    edit(folder / "result.json", restarts=2, wall_seconds=30.0)
    collection = collect([str(folder)])
    assert [line.step for line in after_warm_up(collection.runs[0].reports)] == [20, 30, 50]
    (row,) = summarize(collection)
    assert row.total_seconds == 30.0
    assert row.step_seconds.median == 0.1
    assert row.step_seconds.count == 3
    assert "a: restarted 2 x: its total time includes each start-up." in notes([row], collection)
