"""Tests the flags that change any tier."""

import pytest
import yaml

from deploy.__main__ import main
from deploy.cli import submit
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import load_tier
from deploy.vertex.session import Session
from tests.deploy.conftest import JOB, WHERE, Capture
from tests.deploy.emulator import Emulator, ends

SDK = [*WHERE, *JOB, "--backend=sdk"]

pytestmark = pytest.mark.usefixtures("dist")

KEY = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
NETWORK, ACCOUNT = "projects/1/global/networks/n", "trainer@p.iam.gserviceaccount.com"
CHANGES = ["--labels=team=vision,cost=", f"--kms_key={KEY}", f"--network={NETWORK}", f"--service-account={ACCOUNT}"]


@pytest.mark.parametrize(
    ("tier", "flag", "scheduling"),
    [
        ("l4x4", "--spot", {"timeout": "86400s", "strategy": "SPOT"}),
        ("h100x1", "--spot", {"timeout": "86400s", "strategy": "SPOT"}),
        ("l4x4", "--flex_start=2h", {"timeout": "86400s", "strategy": "FLEX_START", "maxWaitDuration": "7200s"}),
        ("h100x1", "--flex_start=30m", {"timeout": "86400s", "strategy": "FLEX_START", "maxWaitDuration": "1800s"}),
    ],
)
def test_flags_change_any_tier(
    tier: str, flag: str, scheduling: dict[str, str], cloud: Emulator, session: Session, capsys: Capture
) -> None:
    cloud.run = ends("SUCCEEDED")
    assert submit.main([tier, *SDK, *CHANGES, flag], session) == 0
    (job,) = cloud.jobs.values()
    sent = job["jobSpec"]
    assert (sent["scheduling"], sent["network"], sent["serviceAccount"]) == (scheduling, NETWORK, ACCOUNT)
    assert job["encryptionSpec"] == {"kmsKeyName": KEY}
    strategy = scheduling["strategy"].lower()
    assert {"cost": "", "team": "vision"}.items() <= job["labels"].items()
    pool = load_tier(tier).pools[0]
    price = getattr(load_machines().price(pool.machine_type, pool.accelerator_type, pool.accelerators), strategy)
    labelled = job["labels"].get("usd-per-hour", "").replace("-", ".")
    assert labelled == (
        "" if price is None else f"{price + 100 * 0.17 / 730:.4f}"
    )  # that of L4 as FLEX_START is not known
    assert f", {scheduling['strategy']}" in capsys.readouterr().out


def test_a_rendered_spec_says_what_belongs_beside_it(capsys: Capture) -> None:
    assert main(["render", "l4x4", *WHERE, *JOB, *CHANGES, "--spot"]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["serviceAccount"] == ACCOUNT
    assert f"create the job with --labels=team=vision,cost= --kms-key={KEY}\n" in shown.err
