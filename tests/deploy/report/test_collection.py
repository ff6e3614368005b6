"""Tests how folders of job directories, local and in a bucket, become tiers."""

import json
from pathlib import Path

import pytest

from deploy.comparison.directory import check_folder
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.report.table import to_json
from tests.deploy.conftest import put
from tests.deploy.planted import edit, plant, sample, write_files
from tests.support import refused
from trainer.base.storage.local_files import Address


def test_folders_of_runs_and_of_repeats_become_tiers() -> None:
    Path("no-run").mkdir()
    repeats = ["repeat-1", "repeat-2", "repeat-10"]
    for name in ("one", *(f"two/{repeat}" for repeat in repeats)):
        plant(name, [0.2, 0.1, 0.1])
    one, two = collect(["."]).tiers
    assert (one.name, len(one.runs), two.name) == ("one", 1, "two")
    assert [run.folder.name for run in two.runs] == repeats
    assert [tier.name for tier in collect(["./one"]).tiers] == ["one"]
    tiers = [{"name": "two", "machine_type": "n1"}, {"name": "three", "machine_type": "n2"}]
    asked = {"on": "local", "scaling": "strong", "tiers": tiers}
    Path("comparison.json").write_text(json.dumps(asked))
    # a tier of a comparison, and one of its runs
    for folder, runs in (("two", 3), ("two/repeat-2", 1)):
        two, one = collect([f"./{folder}", "./one"]).tiers
        assert (two.name, len(two.runs), one.name) == ("two", runs, "one")
        assert two.tier
        assert two.local
        assert not one.tier


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_job_directories_are_read_from_a_bucket(bucket: Address) -> None:
    """Reads one, a folder of them, and a comparison, with the same values as local ones; fetches
    only what it reads."""
    for name in ("one", "two/repeat-1", "two/repeat-2"):
        sample(plant(f"runs/{name}", [0.2, 0.1, 0.1]))
    write_files({"weights": "large"}, "runs/one/checkpoints")
    put(Path("runs"), bucket / "lab/runs")
    local, remote = (
        to_json(summarize(collect([path])), [], []) for path in ("./runs", f"{bucket}lab/runs")
    )
    assert local == remote
    (run,) = collect([f"{bucket}lab/runs/one/"]).runs
    assert run.folder.name == "one"
    assert run.problems == ()
    names = sorted(file.name for file in run.folder.rglob("*.*"))
    assert names == ["result.json", "run.json", "stats.jsonl", "step-00000500.png"]
    asked = '{"on": "vertex", "tiers": [{"name": "two", "machine_type": "n1"}]}'
    Path("runs/comparison.json").write_text(asked)
    put(Path("runs"), bucket / "lab/runs")
    (row,) = summarize(collect([f"{bucket}lab/runs"]))
    assert row.tier == "two"
    assert row.machine == "n1"
    assert row.repeats == 2
    with refused(f"report={bucket}lab/none: no objects found"):
        collect([f"{bucket}lab/none"])


def test_folders_without_a_run_are_refused() -> None:
    plant("x/a", [0.1, 0.1])
    plant("y/a", [0.1, 0.1])
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged/comparison.json").write_text('{"tiers": [{"nme": "a"}]}')
    for folders, line in {
        ("none",): "no such folder",
        ("empty",): "no run.json, stats.jsonl, result.json in it",
        ("damaged",): "comparison.json is damaged",
        ("x/a", "y/a"): "a names two tiers",
    }.items():
        with refused(line):
            collect(folders)


def test_a_run_of_a_version_before_0_3_is_refused() -> None:
    """Both by a report, and by a comparison that would go on with it."""
    run = plant("l4x1/repeat-1", [0.2, 0.1, 0.1])
    for version, old in (("0.3.0", False), ("0.20.1", False), ("0.2.0", True)):
        edit(run / "run.json", versions={"trainer": version})
        if not old:
            assert collect(["."]).runs
    for use in (lambda: collect(["."]), lambda: check_folder(Path(), {})):
        with refused(f"{run}: written by a version before 0.3: use vertex-trainer 0.3 to read it"):
            use()
