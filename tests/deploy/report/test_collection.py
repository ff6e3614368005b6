"""Tests how folders of job directories, local and in a bucket, become tiers."""

import json
from pathlib import Path

import pytest

from deploy.comparison.directory import check_folder
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.report.table import to_json
from tests.deploy.conftest import put
from tests.deploy.planted import edit, plant, sample
from tests.support import refused
from trainer.base.storage.local_files import Address


def test_folders_of_runs_and_of_repeats_become_tiers(tmp_path: Path) -> None:
    (tmp_path / "no-run").mkdir()
    for name in ("one", "two/repeat-1", "two/repeat-2", "two/repeat-10"):
        plant(tmp_path / name, [0.2, 0.1, 0.1])
    collection = collect([str(tmp_path)])
    assert {tier.name: len(tier.runs) for tier in collection.tiers} == {"one": 1, "two": 3}
    assert [run.folder.name for run in collection.tiers[1].runs] == [
        "repeat-1",
        "repeat-2",
        "repeat-10",
    ]
    assert [tier.name for tier in collect([f"{tmp_path}/one"]).tiers] == ["one"]
    tiers = [{"name": "two", "machine_type": "n1"}, {"name": "three", "machine_type": "n2"}]
    (tmp_path / "comparison.json").write_text(
        json.dumps({"on": "local", "scaling": "strong", "tiers": tiers})
    )
    # a tier of a comparison, and one of its runs
    for folder, runs in (("two", 3), ("two/repeat-2", 1)):
        part = collect([f"{tmp_path}/{folder}", f"{tmp_path}/one"])
        assert [(tier.name, len(tier.runs), bool(tier.tier)) for tier in part.tiers] == [
            ("two", runs, True),
            ("one", 1, False),
        ]
        assert part.tiers[0].local


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_job_directories_are_read_from_a_bucket(tmp_path: Path, bucket: Address) -> None:
    """Reads one, a folder of them, and a comparison, with the same values as local ones; fetches
    only what it reads."""
    for name in ("one", "two/repeat-1", "two/repeat-2"):
        sample(plant(tmp_path / "runs" / name, [0.2, 0.1, 0.1]))
    (tmp_path / "runs" / "one" / "checkpoints").mkdir()
    (tmp_path / "runs" / "one" / "checkpoints" / "weights").write_bytes(b"large")
    put(tmp_path / "runs", bucket / "lab/runs")
    local, remote = (
        to_json(summarize(collect([path])), [], [])
        for path in (f"{tmp_path}/runs", f"{bucket}lab/runs")
    )
    assert local == remote
    (run,) = collect([f"{bucket}lab/runs/one/"]).runs
    assert (run.folder.name, run.problems) == ("one", ())
    assert sorted(file.name for file in run.folder.rglob("*") if file.is_file()) == [
        "result.json",
        "run.json",
        "stats.jsonl",
        "step-00000500.png",
    ]
    (tmp_path / "runs" / "comparison.json").write_text(
        '{"on": "vertex", "tiers": [{"name": "two", "machine_type": "n1", "price_per_hour": 1.0}]}'
    )
    put(tmp_path / "runs", bucket / "lab/runs")
    (row,) = summarize(collect([f"{bucket}lab/runs"]))
    assert (row.tier, row.machine, row.repeats, row.price_per_hour) == ("two", "n1", 2, 1.0)
    with refused(f"report={bucket}lab/none: no objects found"):
        collect([f"{bucket}lab/none"])


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    plant(tmp_path / "x" / "a", [0.1, 0.1])
    plant(tmp_path / "y" / "a", [0.1, 0.1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "comparison.json").write_text('{"tiers": [{"nme": "a"}]}')
    for folders, line in {
        ("none",): "no such folder",
        ("empty",): "no run.json, stats.jsonl, result.json in it",
        ("damaged",): "comparison.json is damaged",
        ("x/a", "y/a"): "a names two tiers",
    }.items():
        with refused(line):
            collect([str(tmp_path / folder) for folder in folders])


def test_a_run_of_a_version_before_0_3_is_refused(tmp_path: Path) -> None:
    """Both by a report, and by a comparison that would go on with it."""
    run = plant(tmp_path / "l4x1" / "repeat-1", [0.2, 0.1, 0.1])
    for version, old in (("0.3.0", False), ("0.20.1", False), ("0.2.0", True)):
        edit(run / "run.json", versions={"trainer": version})
        if not old:
            assert collect([str(tmp_path)]).runs
    for use in (lambda: collect([str(tmp_path)]), lambda: check_folder(tmp_path, {})):
        with refused(f"{run}: written by a version before 0.3: use vertex-trainer 0.3 to read it"):
            use()
