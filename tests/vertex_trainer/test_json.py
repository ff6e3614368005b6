"""Tests that --json prints documents of the schema on stdout alone, and that no field of the schema
goes."""

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from deploy.__main__ import main
from deploy.cli.output import SCHEMA_VERSION
from tests.deploy.conftest import JOB, ROOT, WHERE, Capture, task_of, trains
from tests.deploy.emulator import Emulator, ends
from tests.deploy.planted import plant, planted_plan
from tests.deploy.platform.test_registry import ROWS, a_run, register
from tests.fixtures import Json

SCHEMA = json.loads((ROOT / "docs" / "json.schema.json").read_text(encoding="utf-8"))
IMAGE = ["--image=us-docker.pkg.dev/p/r/x:1"]
SDK = [*WHERE, *JOB, *IMAGE, "--backend=sdk"]
# The fields of version 1. One that goes, or gets another name, needs a new version.
FIELDS = {
    "interval": "low middle high",
    "price": "list spot flex_start inferred lower_bound",
    "tiers": "date region tiers tier machine price",
    "machines": "date region machines machine accelerator count price",
    "findings": "findings subject state text command",
    "plan": (
        "about sentences notes tiers tier kind machine devices batch_per_device fit step seconds"
        " install_seconds steps basis measured compiled offers problems strategy usd_per_hour"
        " hours usd"
    ),
    "dry_run": (
        "requests about tier project region output display_name labels spec usd_per_hour most_usd"
    ),
    "submitted": (
        "submission job exit_code attempts tier project region usd_per_hour output state job error"
        " spent_usd sent_at"
    ),
    "status": (
        "name display_name state created started ended error labels strategy timeout_s output"
        " checks limited shells machine"
    ),
    "jobs": "jobs",
    "line": "line time text worker severity",
    "ended": "status exit_code",
    "bill": "jobs job submission tier estimated_usd billed_usd",
    "prices": "region date prices differences",
    "cleaned": "removed packages images address bytes",
    "comparison": "folder exit_code tiers verdict notes",
}


@pytest.fixture
def documents(capsys: Capture) -> Any:
    """Returns a function that runs a verb with --json, and returns its documents, each checked by
    the schema."""

    def documents_of(*words: str, code: int = 0) -> list[Json]:
        assert main([*words, "--json"]) == code
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for line in lines:
            jsonschema.validate(line, SCHEMA)
            assert line["schema_version"] == SCHEMA_VERSION
            assert line["verb"] == words[0]
        return lines

    return documents_of


def test_each_verb_prints_documents_of_the_schema(
    documents: Any, cloud: Emulator, capsys: Capture
) -> None:
    assert {tier["tier"] for tier in documents("machines")[0]["tiers"]} >= {"cpu", "l4x4"}
    assert documents("machines", "--all")[0]["machines"]
    flags = ["--recipe=mlp_mnist", f"--plan={planted_plan()}", "--global_batch_size=64"]
    assert documents("plan", "l4x1", *flags, "--out=plan")[0]["tiers"][0]["offers"]
    (dry,) = documents("submit", "l4x1", *SDK, "--dry_run")
    assert task_of(dry["requests"][0]["spec"])["args"]
    assert cloud.requests == []
    assert documents("doctor", "--region=us-central1")[0]["findings"]
    cloud.run = ends("SUCCEEDED")
    (sent,) = documents("submit", "l4x1", *SDK)
    assert sent["attempts"][-1]["state"] == "SUCCEEDED"
    listed = documents("jobs", "--region=us-central1")[0]["jobs"]
    assert [job["name"] for job in listed] == [sent["job"]]
    first, *_, end = documents("watch")
    assert first["line"]["text"] == end["status"]["state"] == "SUCCEEDED"
    cloud.log(cloud.job, "step 1")
    assert [logged["line"]["text"] for logged in documents("logs")] == ["step 1"]
    assert documents("cancel", "--yes")[0]["status"]["state"] == "SUCCEEDED"
    assert documents("report", str(plant("run", [0.1] * 4)))[0]["tiers"][0]["tier"] == "run"
    flags = ["--on=vertex", *SDK, "--out=tiers", "--dry_run"]
    assert documents("compare", "l4x1", "l4x2", *flags)[0]["tiers"] == []
    register(a_run())
    capsys.readouterr()
    cloud.objects["my-bucket/rows.jsonl"] = b"[1]\n"
    words = ["predict", "digits", *ROWS, "--tier=cpu", "--backend=sdk"]
    (dry,) = documents(*words, "--dry_run")
    assert "--out=gs://my-bucket/out" in task_of(dry["requests"][0]["spec"])["args"]
    assert documents(*words)[0]["attempts"][-1]["state"] == "SUCCEEDED"


def test_a_comparison_that_ran_is_a_document(
    documents: Any, cloud: Emulator, target: list[str], tmp_path: Path
) -> None:
    cloud.run = trains(tmp_path / "trained")
    flags = [*target[:-1], *JOB, *IMAGE, "--backend=sdk"]
    (compared,) = documents("compare", "l4x1", "l4x2", *flags, "--out=out")
    assert [tier["state"] for tier in compared["tiers"]] == ["done", "done"]
    assert compared["verdict"]
    assert documents("compare", "h100x8", "h100x4", *flags, "--out=dear", code=2) == []


def fields(part: Any) -> list[str]:
    """Returns the names of all fields that a part of the schema requires."""
    if isinstance(part, list):
        return [name for entry in part for name in fields(entry)]
    if not isinstance(part, dict):
        return []
    return [*part.get("required", []), *(name for entry in part.values() for name in fields(entry))]


def test_no_field_of_the_schema_goes() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert {
        name: " ".join(fields(part)) for name, part in SCHEMA["$defs"].items() if fields(part)
    } == FIELDS
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    for name, part in SCHEMA["$defs"].items():
        if "properties" in part:
            assert part["required"] == list(part["properties"]), name
