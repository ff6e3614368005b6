"""Tests --image=auto: the image of what a job requires is found, or made while the job starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import plan, submit
from deploy.packaging import distributions
from deploy.platform import automatic_image
from tests.deploy.conftest import BY_SDK, WHERE, error_of, start_of
from tests.deploy.emulator import Emulator, Fault, ends
from tests.deploy.image_emulator import BASE, REPOSITORY, push
from tests.deploy.planted import planted_plan
from tests.fixtures import Capture

AUTO = [*BY_SDK, "--image=auto"]
ONCE = "once for the project: `gcloud services enable artifactregistry.googleapis.com"
REPOSITORY_COMMAND = (
    "`gcloud artifacts repositories create trainer --repository-format=docker"
    " --location=us-central1 --project=my-proj`"
)


@pytest.fixture(autouse=True)
def _caches() -> None:
    automatic_image._resolved.cache_clear()
    automatic_image._base_digest.cache_clear()


def container(google: Emulator) -> Any:
    """Returns the containerSpec of the newest job."""
    return [*google.jobs.values()][-1]["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]


def test_the_first_job_installs_and_the_next_runs_in_the_image(
    cloud: Emulator, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        distributions, "versions", lambda: {"tensorflow": "2.21.0", "keras": "3.15.1"}
    )
    cloud.run = ends("SUCCEEDED")
    assert submit.main(["l4x4", *AUTO]) == 0
    assert container(cloud)["imageUri"] == "python:3.12-slim"
    shown = capsys.readouterr().out
    (build,) = cloud.builds
    (tag,) = build["tags"]
    assert build["images"] == [f"{REPOSITORY}/auto:{tag}"]
    assert f"Cloud Build makes {REPOSITORY}/auto:{tag}: https://console.cloud" in shown
    command, _, file = build["steps"][0]["script"].partition("\n")
    assert command == f"docker build --tag={REPOSITORY}/auto:{tag} - <<'END'"
    first, second, end = file.splitlines()
    assert (first, end) == (f"FROM python@{BASE}", "END")
    installed = json.loads(second.removeprefix("RUN "))
    assert installed[:4] == ["pip", "install", "--no-cache-dir", "uv"]
    assert {"tensorflow[and-cuda]==2.21.0", "keras==3.15.1", "pyyaml>=6"} <= {*installed}

    # The same list, and nobody asks twice; a tier without GPUs has another.
    assert submit.main(["l4x1", *AUTO, "--again"]) == 0
    assert "the state of its build is QUEUED: https://logs/1" in capsys.readouterr().out
    assert submit.main(["cpu", *AUTO, "--again"]) == 0
    assert len(cloud.builds) == 2
    del cloud.builds[0]

    uri = push(cloud)
    capsys.readouterr()
    assert submit.main(["l4x4", *AUTO, "--again", "--dry_run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    spec = document["requests"][0]["spec"]
    assert submit.main(["l4x4", *AUTO, "--again"]) == 0
    task = container(cloud)
    assert task["imageUri"] == spec["workerPoolSpecs"][0]["containerSpec"]["imageUri"] == uri
    plan_of_start = start_of(task)
    assert plan_of_start["requirements"] == ["--no-deps"]
    assert (plan_of_start["gpus"], len(plan_of_start["packages"])) == (4, 1)
    shown = capsys.readouterr().out
    assert f"runs in {uri}, which has all that this job requires: nothing is installed" in shown
    assert "each worker installs" not in shown
    assert len(cloud.builds) == 1


@pytest.mark.parametrize("lacks", ["GET .*/dockerImages", "GET .*/tags/3.12-slim", "POST /build/"])
def test_where_no_image_can_be_made_a_line_says_what_makes_it_possible(
    lacks: str, cloud: Emulator, capsys: Capture
) -> None:
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault(lacks, 404, times=9, message="it is not there")]
    assert submit.main(["cpu", *AUTO]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "it is not there" in line]
    assert ONCE in line
    assert REPOSITORY_COMMAND in line
    assert (container(cloud)["imageUri"], cloud.builds) == ("python:3.12-slim", [])


def test_scripts_name_packages_alone_and_uv_resolves_them(
    cloud: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.run = ends("SUCCEEDED")
    Path("train.py").write_text("print(1)\n")
    script = ["cpu", *WHERE, "--backend=sdk", "--image=auto", "--script=train.py"]
    assert submit.main(script) == 0  # the standard library alone
    assert cloud.builds == []
    Path("requirements.txt").write_text("--pre\nrich\n")
    assert "requirements.txt has options of pip: list packages alone" in error_of(
        submit.main, script
    )
    Path("requirements.txt").write_text("rich\n")
    (tmp_path / "uv").write_text("#!/bin/sh\nsed s/rich/rich==14.1.0/\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert submit.main(script) == 0
    assert '"uv", "rich==14.1.0"]' in cloud.builds[0]["steps"][0]["script"]
    push(cloud)
    assert submit.main([*script, "--again"]) == 0
    told = start_of(container(cloud))
    assert (told["requirements"], told["packages"]) == ([], [])


def test_a_plan_counts_an_installation_or_none(
    cloud: Emulator, tmp_path: Path, capsys: Capture
) -> None:
    cloud.run = ends("SUCCEEDED")
    words = ["l4x1", "--recipe=mlp_mnist", "--steps=20000", f"--plan={planted_plan()}"]
    words += [f"--out={tmp_path / 'out'}", "--region=us-central1", "--image=auto"]

    def minutes() -> float:
        assert plan.main(words) == 0
        (tier,) = json.loads((tmp_path / "out" / "forecast.json").read_text())["tiers"]
        return float(tier["install_seconds"]["middle"]) / 60

    assert minutes() == 4
    assert "Cloud Build makes the image that the next such job runs in" in capsys.readouterr().out
    job = ["l4x1", *WHERE, "--backend=sdk", "--image=auto", "--recipe=mlp_mnist", "--data=digits"]
    assert submit.main([*job, "--steps=9"]) == 0
    push(cloud)
    assert minutes() == 0
