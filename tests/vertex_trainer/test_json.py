"""Tests that --json prints documents of the schema on stdout alone, and that no field of the schema
goes."""

import importlib
import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from deploy.__main__ import MODULES, main
from deploy.cli.output import SCHEMA_VERSION
from deploy.platform.gcloud_and_sdk import Session
from tests.deploy.conftest import JOB, ROOT, WHERE, Capture, trains
from tests.deploy.emulator import Emulator, ends
from tests.deploy.planted import plant, planted_plan
from tests.deploy.platform.test_registry import a_run, registered

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
def documents(session: Session, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Any:
    """Returns a function that runs a verb with --json, and returns its documents, each checked by
    the schema."""

    def documents_of(*words: str, code: int = 0) -> list[dict[str, Any]]:
        module = importlib.import_module(f"deploy.cli.{MODULES.get(words[0], words[0])}")
        name = f"run_{words[0]}" if words[0] in MODULES else "main"
        verb = getattr(module, name)
        if "session" in verb.__annotations__:
            monkeypatch.setattr(
                module, name, lambda arguments, given=session: verb(arguments, given)
            )
        assert main([*words, "--json"]) == code
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for line in lines:
            jsonschema.validate(line, SCHEMA)
            assert (line["schema_version"], line["verb"]) == (SCHEMA_VERSION, words[0])
        return lines

    return documents_of


def test_each_verb_prints_documents_of_the_schema(
    documents: Any, cloud: Emulator, session: Session, tmp_path: Path
) -> None:
    assert {tier["tier"] for tier in documents("machines")[0]["tiers"]} >= {"cpu", "l4x4"}
    assert documents("machines", "--all")[0]["machines"][0]["price"]["list"] > 0
    flags = [
        f"--plan={planted_plan(tmp_path)}",
        "--global_batch_size=64",
        f"--out={tmp_path / 'plan'}",
    ]
    assert (
        documents("plan", "l4x1", "--recipe=mlp_mnist", *flags)[0]["tiers"][0]["offers"][0]["usd"][
            "low"
        ]
        > 0
    )
    (dry,) = documents("submit", "l4x1", *SDK, "--dry_run")
    assert (
        dry["requests"][0]["spec"]["workerPoolSpecs"][0]["machineSpec"]["acceleratorType"]
        == "NVIDIA_L4"
    )
    assert cloud.requests == []
    assert {
        finding["state"] for finding in documents("doctor", "--region=us-central1")[0]["findings"]
    } >= {"good"}
    cloud.run = ends("SUCCEEDED")
    (sent,) = documents("submit", "l4x1", *SDK)
    assert (sent["attempts"][-1]["state"], sent["exit_code"]) == ("SUCCEEDED", 0)
    listed = documents("jobs", "--region=us-central1", "--backend=sdk")[0]["jobs"]
    assert [job["name"] for job in listed] == [sent["job"]]
    *lines, end = documents("watch", "--backend=sdk")
    assert lines[0]["line"]["text"] == "SUCCEEDED"
    assert (end["status"]["state"], end["exit_code"]) == ("SUCCEEDED", 0)
    cloud.log(next(iter(cloud.jobs.values())), "step 1")
    assert [logged["line"]["text"] for logged in documents("logs", "--backend=sdk")] == ["step 1"]
    assert documents("cancel", "--backend=sdk", "--yes")[0]["status"]["state"] == "SUCCEEDED"
    assert (
        documents("report", str(plant(tmp_path / "run", [0.1] * 4)))[0]["tiers"][0]["tier"] == "run"
    )
    folder = [f"--out={tmp_path / 'tiers'}", "--dry_run"]
    assert documents("compare", "l4x1", "l4x2", "--on=vertex", *SDK, *folder)[0]["tiers"] == []

    assert registered(session, a_run(tmp_path / "registered")) == 0
    cloud.objects["my-bucket/rows.jsonl"] = b"[1]\n"
    words = [
        "predict",
        "digits",
        "gs://my-bucket/rows.jsonl",
        "gs://my-bucket/out",
        *WHERE[:1],
        "--backend=sdk",
    ]
    (dry,) = documents(*words, "--tier=cpu", "--dry_run")
    assert dry["requests"][0]["spec"]["workerPoolSpecs"][0]["containerSpec"]["args"][1:] == [
        "--rows_file=gs://my-bucket/rows.jsonl",
        "--out=gs://my-bucket/out",
    ]
    (sent,) = documents(*words, "--tier=cpu")
    assert (sent["attempts"][-1]["state"], sent["exit_code"]) == ("SUCCEEDED", 0)


def test_a_comparison_that_ran_is_a_document(
    documents: Any, cloud: Emulator, target: list[str], tmp_path: Path
) -> None:
    cloud.run = trains(tmp_path / "trained")
    (compared,) = documents("compare", "l4x1", "l4x2", *target, *JOB, *IMAGE, "--backend=sdk")
    assert [(tier["tier"], tier["state"]) for tier in compared["tiers"]] == [
        ("l4x1", "done"),
        ("l4x2", "done"),
    ]
    assert (compared["exit_code"], bool(compared["verdict"])) == (0, True)
    documents(
        "compare",
        "h100x8",
        "h100x4",
        *target[:-1],
        *JOB,
        *IMAGE,
        "--backend=sdk",
        f"--out={tmp_path}/x",
        code=2,
    )


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


def test_an_error_is_one_line_and_no_document(capsys: Capture) -> None:
    assert main(["submit", "l4x9", "--json"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
