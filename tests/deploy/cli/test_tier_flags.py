"""Tests flags that change or replace a tier, what a job may cost, and the lists of machines and
jobs."""

import json
import re
from pathlib import Path

import pytest
import yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec
from google.protobuf.json_format import MessageToDict

from deploy.__main__ import main
from deploy.planning.forecast import PricedEstimate
from deploy.planning.step_time import Interval
from deploy.platform.gcloud_and_sdk import to_yaml
from deploy.tiers.machine_table import load_machines
from tests.deploy.cli.wrong_inputs import GOOD
from tests.deploy.conftest import BY_SDK, JOB, WHERE, Command, start_of, task_of, variables_of
from tests.deploy.emulator import Emulator, ends
from tests.deploy.planted import content, planted_plan
from tests.fixtures import Json, Patch

KEY = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
NETWORK = "projects/1/global/networks/n"
ACCOUNT = "trainer@p.iam.gserviceaccount.com"
CHANGES = [
    "--labels=team=vision,cost=",
    f"--kms_key={KEY}",
    f"--network={NETWORK}",
    f"--service-account={ACCOUNT}",
]


@pytest.mark.parametrize(
    ("tier", "flags", "scheduling"),
    [
        ("h100x1", ["--spot"], {"strategy": "SPOT"}),
        # whose price is not known
        (
            "l4x4",
            ["--flex_start", "--max_wait=2h"],
            {"strategy": "FLEX_START", "maxWaitDuration": "7200s"},
        ),
    ],
)
def test_flags_change_any_tier(
    tier: str, flags: list[str], scheduling: dict[str, str], cloud: Emulator, typed: Command
) -> None:
    cloud.run = ends("SUCCEEDED")
    shown = typed("submit", tier, *BY_SDK, *CHANGES, *flags)
    job = cloud.job
    sent = job["jobSpec"]
    assert sent["scheduling"] == {"timeout": "86400s", **scheduling}
    assert sent["network"] == NETWORK
    assert sent["serviceAccount"] == ACCOUNT
    assert job["encryptionSpec"] == {"kmsKeyName": KEY}
    assert {"cost": "", "team": "vision"}.items() <= job["labels"].items()
    spot = tier == "h100x1"
    price = load_machines().price("a3-highgpu-1g", "NVIDIA_H100_80GB", 1).spot
    labelled = job["labels"].get("usd-per-hour", "").replace("-", ".")
    assert labelled == (f"{price + 100 * 0.17 / 730:.4f}" if spot else "")
    assert f", {scheduling['strategy']}" in shown
    assert ("SPOT machines away: the job then starts again" in shown) == spot


def test_what_is_shown_is_what_is_sent(cloud: Emulator, typed: Command) -> None:
    """The spec, the document and the staged file of a job are those of its request."""
    flags = ["l4x4", *WHERE, *JOB, *CHANGES, "--spot", "--project=p", "--name=demo"]
    spec = typed("submit", *flags, "--spec")
    (request,) = json.loads(typed("submit", *flags, "--dry_run", "--json"))["requests"]
    typed("submit", *flags, "--out=job.yaml")
    assert Path("job.yaml").read_text() == spec
    assert to_yaml(request["spec"]) == spec
    by_sdk, shown = (
        CustomJobSpec.from_json(json.dumps(each))
        for each in (sent(cloud, *flags), yaml.safe_load(spec))
    )
    assert by_sdk == shown
    labels = {
        name: text for name, text in cloud.bodies[-1]["labels"].items() if name != "submission"
    }
    assert labels.items() <= request["labels"].items()


IMAGE = "--image=us-docker.pkg.dev/p/r/x:1"
RESERVATION = "projects/p/zones/us-central1-a/reservations/r"
SECRET = "projects/p/secrets/s/versions/3"


def sent(cloud: Emulator, *flags: str) -> Json:
    """Returns the jobSpec that the SDK sent."""
    cloud.run = ends("SUCCEEDED")
    assert main(["submit", *flags, *BY_SDK]) == 0
    return cloud.bodies[-1]["jobSpec"]


def test_flags_of_one_job_are_in_its_request(cloud: Emulator) -> None:
    flags = [
        "--timeout=2h",
        "--disk_gb=500",
        f"--reservation={RESERVATION}",
        "--web_access",
        "--env=A=x,y=z",
    ]
    spec = sent(cloud, "l4x1-2workers", IMAGE, *flags)
    assert spec["scheduling"]["timeout"] == "7200s"
    assert spec["enableWebAccess"]
    for pool in spec["workerPoolSpecs"]:
        assert pool["diskSpec"]["bootDiskSizeGb"] == 500
        assert pool["containerSpec"]["env"] == [{"name": "A", "value": "x,y=z"}]
        assert pool["machineSpec"]["reservationAffinity"]["values"] == [RESERVATION]


def test_a_machine_without_a_tier(cloud: Emulator) -> None:
    spec = sent(cloud, "--machine_type=g2-standard-24", "--accelerator=NVIDIA_L4:2", IMAGE)
    (pool,) = spec["workerPoolSpecs"]
    assert pool["machineSpec"]["machineType"] == "g2-standard-24"
    assert pool["machineSpec"]["acceleratorCount"] == 2
    assert spec["scheduling"]["timeout"] == "86400s"
    assert "diskSpec" not in pool


def test_an_image_of_ones_own_reads_secrets_by_the_bootstrap_first(cloud: Emulator) -> None:
    task = task_of(sent(cloud, "cpu", IMAGE, f"--secret=HF_TOKEN={SECRET}"))
    assert json.loads(variables_of(task)["TRAINER_SECRETS"]) == {"HF_TOKEN": SECRET}
    assert start_of(task)["module"] == "trainer.task"
    assert task["command"][3].removeprefix("gs://") in cloud.objects
    assert task["args"] == [*JOB, "--expect_devices=0"]


@pytest.mark.parametrize(
    ("tier", "plan", "flags", "asks"),
    [
        ("h100x8", None, [], True),  # 24 hours of it
        ("h100x8", None, ["--timeout=2h"], False),
        ("h100x8", None, ["--max_cost=2500"], False),
        ("h100x8", Interval(10.0, 20.0, 49.0), [], False),
        ("l4x4", Interval(10.0, 20.0, 51.0), [], True),
    ],
)
def test_what_costs_much_is_asked_about(
    tier: str,
    plan: Interval | None,
    flags: list[str],
    asks: bool,
    cloud: Emulator,
    monkeypatch: Patch,
    typed: Command,
) -> None:
    offer = PricedEstimate("STANDARD", 1.0, plan, plan) if plan else None
    monkeypatch.setattr("deploy.planning.paid_jobs.estimate", lambda job: offer)
    command = ["submit", tier, *BY_SDK, IMAGE, "--detach", *flags]
    dry = typed(*command, "--dry_run")
    assert ("needs confirmation; refused in non-interactive use" in dry) == asks
    if asks:
        error = typed(*command, code=2)
        assert re.search("may cost .* USD until the timeout; .*: not submitted: set a limit", error)
        paths = [*cloud.requests]
        assert not any("customJobs" in path or "upload" in path for path in paths)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda: "y")
    shown = typed(*command)
    said = f"by plan {plan.low:.2f} to {plan.high:.2f} USD" if plan else "there is no plan"
    assert asks or f" USD until the timeout; {said}" in shown


def test_tiers_and_regions_in_turn_cost_what_one_of_them_may_and_prices_of_another_region_are_said(
    cloud: Emulator, typed: Command
) -> None:
    tiers = ["submit", "l4x1", "l4x4", *JOB, "--bucket=gs://my-bucket", "--project=p", "--dry_run"]
    turn = [*tiers, "--region=us-central1,asia-south1"]
    assert "max_cost=5: the prices of asia-south1 are not known" in typed(
        *turn, "--max_cost=5", code=2
    )
    warning = "warning: no price for asia-south1: that of us-central1 is used: `python -m deploy"
    assert typed(*turn).count(warning) == 1
    Path("prices.yaml").write_text("g2-standard-12: 2.0\ng2-standard-48: 8.0\n")
    shown = typed(*turn, "--prices=prices.yaml", "--max_cost=5")
    assert "only if the one before never started: 5.00 USD at most together\n" in shown
    shown = typed(
        *tiers[:2], *tiers[3:], "--region=asia-south1", "--prices=prices.yaml", "--max_cost=5"
    )
    assert "no price for" not in shown
    assert "at most together" not in shown


def test_a_job_on_a_persistent_resource_is_sent_as_said_and_has_no_price_of_its_own(
    cloud: Emulator, typed: Command, refused: Command
) -> None:
    cloud.run = ends("SUCCEEDED")
    Path("kept.yaml").write_text(f"persistentResourceId: kept-l4{GOOD}")
    job = ["submit", "kept.yaml", *BY_SDK, IMAGE, "--job_dir=gs://my-bucket/kept"]
    (request,) = json.loads(typed(*job, "--dry_run", "--json"))["requests"]
    shown = typed(*job)
    (made,) = cloud.jobs.values()
    said = CustomJobSpec.from_json(json.dumps(request["spec"]))
    assert made["jobSpec"] == MessageToDict(CustomJobSpec.pb(said))
    assert said.persistent_resource_id == "kept-l4"
    assert "usd-per-hour" not in made["labels"]
    assert "STANDARD, of the persistent resource kept-l4\n" in shown
    assert "kept: nothing of its own: the persistent resource kept-l4 costs 4.63 USD an" in shown

    words = ["kept.yaml", "--recipe=mlp_mnist", "--steps=20000", "--out=out", IMAGE]
    typed("plan", *words, f"--plan={planted_plan()}")
    (tier,) = content("out/forecast.json")["tiers"]
    assert [offer["strategy"] for offer in tier["offers"]] == ["STANDARD"]
    assert tier["install_seconds"]["middle"] == 0
    assert "which costs them with and without this job" in tier["problems"][-1]
    for flag in ("--spot", "--flex_start"):
        assert "persistentResourceId: the one asks for new machines" in refused(*job, flag)
