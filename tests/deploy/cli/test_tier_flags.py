"""Tests flags that change or replace a tier, what a job may cost, and the lists of machines and
jobs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec
from google.protobuf.json_format import MessageToDict

from deploy.__main__ import main
from deploy.cli import submit
from deploy.planning.forecast import PricedEstimate
from deploy.planning.step_time import Interval
from deploy.platform.gcloud_and_sdk import Session, to_yaml
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import load_tier
from tests.deploy.cli.wrong_inputs import GOOD
from tests.deploy.conftest import BY_SDK, JOB, WHERE, Capture, error_of
from tests.deploy.emulator import Emulator, ends
from tests.deploy.planted import planted_plan
from trainer.base.errors import UserError

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
    ("tier", "flag", "scheduling"),
    [
        ("l4x4", "--spot", {"timeout": "86400s", "strategy": "SPOT"}),
        ("h100x1", "--spot", {"timeout": "86400s", "strategy": "SPOT"}),
        (
            "l4x4",
            "--flex_start --max_wait=2h",
            {"timeout": "86400s", "strategy": "FLEX_START", "maxWaitDuration": "7200s"},
        ),
        (
            "h100x1",
            "--flex_start --max_wait=30m",
            {"timeout": "86400s", "strategy": "FLEX_START", "maxWaitDuration": "1800s"},
        ),
    ],
)
def test_flags_change_any_tier(
    tier: str,
    flag: str,
    scheduling: dict[str, str],
    cloud: Emulator,
    session: Session,
    capsys: Capture,
) -> None:
    cloud.run = ends("SUCCEEDED")
    assert submit.main([tier, *BY_SDK, *CHANGES, *flag.split()], session) == 0
    (job,) = cloud.jobs.values()
    sent = job["jobSpec"]
    assert (sent["scheduling"], sent["network"], sent["serviceAccount"]) == (
        scheduling,
        NETWORK,
        ACCOUNT,
    )
    assert job["encryptionSpec"] == {"kmsKeyName": KEY}
    strategy = scheduling["strategy"].lower()
    assert {"cost": "", "team": "vision"}.items() <= job["labels"].items()
    facts = load_tier(tier)
    price = getattr(
        load_machines().price(facts.machine_type, facts.accelerator_type, facts.accelerators),
        strategy,
    )
    labelled = job["labels"].get("usd-per-hour", "").replace("-", ".")
    # The price of L4 as FLEX_START is not known.
    assert labelled == ("" if price is None else f"{price + 100 * 0.17 / 730:.4f}")
    shown = capsys.readouterr().out
    assert f", {scheduling['strategy']}" in shown
    assert ("SPOT machines away: the job then starts again on others" in shown) == (
        strategy == "spot"
    )


def test_what_is_shown_is_what_is_sent(cloud: Emulator, session: Session, capsys: Capture) -> None:
    """The spec, the document and the staged file of a job are those of its request."""
    flags = ["l4x4", *WHERE, *JOB, *CHANGES, "--spot", "--project=p", "--name=demo"]
    assert main(["submit", *flags, "--spec"]) == 0
    spec = capsys.readouterr().out
    assert main(["submit", *flags, "--dry_run", "--json"]) == 0
    (request,) = json.loads(capsys.readouterr().out)["requests"]
    assert main(["submit", *flags, "--out=job.yaml"]) == 0
    assert (Path("job.yaml").read_text(), to_yaml(request["spec"])) == (spec, spec)
    by_sdk, shown = (
        CustomJobSpec.from_json(json.dumps(each))
        for each in (sent(cloud, session, *flags), yaml.safe_load(spec))
    )
    assert by_sdk == shown
    labels = {
        name: text for name, text in cloud.bodies[-1]["labels"].items() if name != "submission"
    }
    assert labels.items() <= request["labels"].items()


IMAGE = "--image=us-docker.pkg.dev/p/r/x:1"
RESERVATION = "projects/p/zones/us-central1-a/reservations/r"
SECRET = "projects/p/secrets/s/versions/3"


def sent(cloud: Emulator, session: Session, *flags: str) -> dict[str, Any]:
    """Returns the jobSpec that the SDK sent."""
    cloud.run = ends("SUCCEEDED")
    assert submit.main([*flags, *BY_SDK], session) == 0
    return cloud.bodies[-1]["jobSpec"]


def test_flags_of_one_job_are_in_its_request(cloud: Emulator, session: Session) -> None:
    flags = [
        "--timeout=2h",
        "--disk_gb=500",
        f"--reservation={RESERVATION}",
        "--web_access",
        "--env=A=x,y=z",
    ]
    spec = sent(cloud, session, "l4x1-2workers", IMAGE, *flags)
    assert (spec["scheduling"]["timeout"], spec["enableWebAccess"]) == ("7200s", True)
    for pool in spec["workerPoolSpecs"]:
        assert pool["diskSpec"]["bootDiskSizeGb"] == 500
        assert pool["containerSpec"]["env"] == [{"name": "A", "value": "x,y=z"}]
        assert pool["machineSpec"]["reservationAffinity"]["values"] == [RESERVATION]


@pytest.mark.parametrize(
    ("accelerator", "machine", "count"),
    [("NVIDIA_L4:2", "g2-standard-24", 2), ("", "e2-standard-4", 0)],
)
def test_a_machine_without_a_tier(
    accelerator: str, machine: str, count: int, cloud: Emulator, session: Session
) -> None:
    flags = [
        f"--machine_type={machine}",
        *([f"--accelerator={accelerator}"] if accelerator else []),
    ]
    spec = sent(cloud, session, *flags, IMAGE)
    (pool,) = spec["workerPoolSpecs"]
    assert (pool["machineSpec"]["machineType"], pool["machineSpec"].get("acceleratorCount", 0)) == (
        machine,
        count,
    )
    assert (spec["scheduling"]["timeout"], "diskSpec" in pool) == ("86400s", False)


def test_an_image_of_ones_own_reads_secrets_by_the_starter_first(
    cloud: Emulator, session: Session
) -> None:
    task = sent(cloud, session, "cpu", IMAGE, f"--secret=HF_TOKEN={SECRET}")["workerPoolSpecs"][0][
        "containerSpec"
    ]
    variables = {variable["name"]: variable["value"] for variable in task["env"]}
    assert json.loads(variables["TRAINER_SECRETS"]) == {"HF_TOKEN": SECRET}
    assert json.loads(variables["TRAINER_START"])["module"] == "trainer.task"
    assert task["command"][3].removeprefix("gs://") in cloud.objects
    assert task["args"] == [*JOB, "--expect_devices=0"]


@pytest.mark.parametrize(
    ("tier", "plan", "flags", "asks"),
    [
        ("h100x8", None, [], True),  # 24 hours of it
        ("h100x8", None, ["--timeout=2h"], False),
        ("h100x8", None, ["--max_cost=2500"], False),
        ("h100x8", Interval(10.0, 20.0, 49.0), [], False),
        ("l4x4", None, [], False),
        ("l4x4", Interval(10.0, 20.0, 51.0), [], True),
    ],
)
def test_what_costs_much_is_asked_about(
    tier: str,
    plan: Interval | None,
    flags: list[str],
    asks: bool,
    cloud: Emulator,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    offer = PricedEstimate("STANDARD", 1.0, plan, plan) if plan else None
    monkeypatch.setattr("deploy.planning.paid_jobs.estimate", lambda job: offer)
    command = [tier, *BY_SDK, IMAGE, "--detach", *flags]
    assert submit.main([*command, "--dry_run"], session) == 0
    assert ("needs confirmation; refused in non-interactive use" in capsys.readouterr().out) == asks
    if asks:
        with pytest.raises(
            UserError, match=r"may cost .* USD until the timeout; .*: not submitted: set a limit"
        ):
            submit.main(command, session)
        assert not any("customJobs" in request or "upload" in request for request in cloud.requests)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda: "y")
    assert submit.main(command, session) == 0
    said = (
        f"by plan {plan.low:.2f} to {plan.high:.2f} USD (an estimate)"
        if plan
        else "there is no plan"
    )
    assert asks or f" USD until the timeout; {said}\n" in capsys.readouterr().out


def test_tiers_and_regions_in_turn_cost_what_one_of_them_may_and_prices_of_another_region_are_said(
    cloud: Emulator, capsys: Capture
) -> None:
    tiers = ["submit", "l4x1", "l4x4", *JOB, WHERE[1], "--project=p", "--dry_run"]
    turn = [*tiers, "--region=us-central1,asia-south1"]
    assert main([*turn, "--max_cost=5"]) == 2
    assert "max_cost=5: the prices of asia-south1 are not known" in capsys.readouterr().err
    assert main(turn) == 0
    warning = (
        "warning: no price for asia-south1: that of us-central1 is used: `python -m deploy prices"
        " --region=asia-s"
    )
    assert capsys.readouterr().out.count(warning) == 1
    Path("prices.yaml").write_text("g2-standard-12: 2.0\ng2-standard-48: 8.0\n")
    assert main([*turn, "--prices=prices.yaml", "--max_cost=5"]) == 0
    shown = capsys.readouterr().out
    together = (
        "4 jobs, of which the next is sent only if the one before never started: 5.00 USD at most"
        " together"
    )
    assert f"\n{together}\n" in shown
    assert (
        main(
            [*tiers[:2], *tiers[3:], "--region=asia-south1", "--prices=prices.yaml", "--max_cost=5"]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "no price for" not in shown
    assert "at most together" not in shown


def test_a_job_on_a_persistent_resource_is_sent_as_said_and_has_no_price_of_its_own(
    cloud: Emulator, session: Session, tmp_path: Path, capsys: Capture
) -> None:
    cloud.run = ends("SUCCEEDED")
    Path("kept.yaml").write_text(f"persistentResourceId: kept-l4{GOOD}")
    job = ["kept.yaml", *BY_SDK, IMAGE, "--job_dir=gs://my-bucket/kept"]
    assert submit.main([*job, "--dry_run", "--json"], session) == 0
    (request,) = json.loads(capsys.readouterr().out.splitlines()[-1])["requests"]
    assert submit.main(job, session) == 0
    (made,) = cloud.jobs.values()
    said = CustomJobSpec.from_json(json.dumps(request["spec"]))
    assert made["jobSpec"] == MessageToDict(CustomJobSpec.pb(said))
    assert said.persistent_resource_id == "kept-l4"
    assert "usd-per-hour" not in made["labels"]
    shown = capsys.readouterr().out
    assert "STANDARD, of the persistent resource kept-l4\n" in shown
    assert "kept: nothing of its own: the persistent resource kept-l4 costs 4.63 USD an" in shown

    words = ["kept.yaml", "--recipe=mlp_mnist", "--steps=20000", f"--out={tmp_path}", IMAGE]
    assert main(["plan", *words, f"--plan={planted_plan(tmp_path)}"]) == 0
    (tier,) = json.loads((tmp_path / "forecast.json").read_text())["tiers"]
    assert [offer["strategy"] for offer in tier["offers"]] == ["STANDARD"]
    assert tier["install_seconds"]["middle"] == 0
    assert "which costs them with and without this job" in tier["problems"][-1]
    for flag in ("--spot", "--flex_start"):
        assert "persistentResourceId: the one asks for new machines" in error_of(
            submit.main, [*job, flag], session
        )
