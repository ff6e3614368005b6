"""Tests prices of the Billing Catalog, and what BigQuery's export says was billed."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from google.auth.credentials import AnonymousCredentials

from deploy.cli import bill, prices
from deploy.job.ledger import Attempt, Submission
from deploy.platform import rest
from deploy.platform.gcloud_and_sdk import Session
from deploy.tiers.machine_table import load_machines
from tests.deploy.conftest import ROOT, Capture, error_of
from tests.deploy.emulator import Emulator, Fault
from tests.deploy.platform.billing_services import BILL, COMPUTE, VERTEX, sku
from tests.fixtures import Patch
from tests.support import refused
from trainer.base.errors import UserError

TABLE = "--table=my-proj.billing.gcp_billing_export_v1_0A"
FILE = Path("prices.yaml")
CATALOG = "GET /v1/services"


@pytest.fixture
def services(cloud: Emulator, monkeypatch: Patch) -> Emulator:
    for name in ("CLOUDBILLING", "BIGQUERY"):
        monkeypatch.setenv(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}", f"{cloud.url}/")
    monkeypatch.setattr(rest, "credentials", AnonymousCredentials)
    cloud.skus = {
        name: [sku(text, usd, number) for number, (text, usd) in enumerate(of.items())]
        for name, of in BILL.items()
    }
    return cloud


def asked(session: Session, *flags: str) -> int:
    return prices.main(["--region=us-central1", *flags], session)


def document(capsys: Capture) -> Any:
    """Returns the document of --json, checked by its schema, which is the last line here, after the
    text."""
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    jsonschema.validate(
        made, json.loads((ROOT / "docs" / "json.schema.json").read_text(encoding="utf-8"))
    )
    return made


def test_the_published_bill_is_the_catalogs_price_to_the_cent(
    services: Emulator, session: Session, capsys: Capture
) -> None:
    assert asked(session) == 0
    shown = capsys.readouterr().out
    assert "a3-highgpu-8g as list" not in shown  # the table agrees: 101.007 + local SSD 0.658
    text = FILE.read_text()
    found = yaml.safe_load(text)
    share = {"1g": 1 / 8, "2g": 1 / 4, "4g": 1 / 2, "8g": 1.0}
    assert found.pop("a3-megagpu-8g").keys() == {"list"}
    assert found == {
        f"a3-highgpu-{size}": {
            "list": pytest.approx(part * (101.007 + 0.6575), abs=1e-3),
            "flex_start": pytest.approx(part * 51.495, abs=1e-3),
        }
        for size, part in share.items()
    }
    assert text.startswith("# us-central1, 20")
    assert "# list: 0000-AAAA, 0002-AAAA, 0003-AAAA, 0004-AAAA\n" in text
    assert "a3-highgpu-8g: no price as spot: NVIDIA_H100_80GB (preemptible spot): no SKU" in shown
    price = load_machines(str(FILE.resolve())).price("a3-highgpu-8g", "NVIDIA_H100_80GB", 8)
    assert (price.spot, price.inferred) == (None, False)


def test_a_region_without_any_price_is_refused_and_nothing_written(
    services: Emulator, session: Session
) -> None:
    services.skus = {name: [] for name in services.skus}
    assert "a price there for none of " in error_of(asked, session)
    assert not FILE.exists()


def test_what_differs_from_the_table_is_told(
    services: Emulator, session: Session, capsys: Capture
) -> None:
    services.skus[VERTEX][0] = sku(
        "Vertex AI: training/pipelines on Nvidia H100 80GB in Iowa", 2 * 11.2660332, 0
    )
    assert asked(session) == 0
    line = "a3-highgpu-8g as list in us-central1: 191.793 (+88.7 %, table 101.665)"
    assert line in capsys.readouterr().out
    assert asked(session, "--json") == 0
    made = document(capsys)
    assert line in made["differences"]
    assert made["prices"]["a3-highgpu-8g"]["list"] == pytest.approx(191.793, abs=1e-3)


@pytest.mark.parametrize(
    ("service", "text"),
    [
        (VERTEX, "Vertex AI: Training/Pipelines on NVIDIA H100 80GB in Iowa 2"),
        (COMPUTE, "SSD backed Local Storage 2"),
    ],
)
def test_a_part_with_two_skus_has_no_price_and_their_names_are_told(
    services: Emulator, session: Session, capsys: Capture, service: str, text: str
) -> None:
    services.skus[service].append(sku(text, 1.0, 99))
    with suppress(UserError):  # without a local SSD no machine has a price
        asked(session)
        assert "list" not in (yaml.safe_load(FILE.read_text()) or {}).get("a3-highgpu-8g", {})
    start = "a3-highgpu-8g: no price as list: "
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]
    assert len(told) == 1
    assert f"2 SKUs: {text[:20]}" in told[0]


def test_a_catalog_that_cannot_be_read_writes_nothing(services: Emulator, session: Session) -> None:
    services.faults = [Fault(CATALOG, 403, message="it failed")]
    with refused("the Cloud Billing Catalog: it failed: enable cloudbilling.googleapis.com"):
        asked(session)
    assert not FILE.exists()


def submitted(spent_usd: float | None = 12.4) -> None:
    attempt = Attempt(
        "l4x4",
        "my-proj",
        "us-central1",
        4.6,
        "gs://b/x",
        "SUCCEEDED",
        "projects/1/j/7",
        "",
        spent_usd,
    )
    Submission("20261101-1", [attempt]).write()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [["20261101-1-1", "USD", "12.53"]],
            "projects/1/j/7 (l4x4): estimated 12.40, billed 12.53, +1.0 %\n",
        ),
        ([], "estimated 12.40, no row with the label submission=20261101-1-1 yet"),
        ([["20261101-1-1", "EUR", "9"]], "is in EUR: only exports in USD"),
    ],
)
def test_what_was_billed_stands_beside_the_estimate(
    services: Emulator, session: Session, capsys: Capture, rows: list[list[str]], said: str
) -> None:
    submitted()
    services.billed = rows
    try:
        assert bill.main(["20261101-1", TABLE], session) == 0
        shown = capsys.readouterr().out
    except UserError as error:
        shown = str(error)
    assert said in shown
    (query,) = services.queries
    assert "`my-proj.billing.gcp_billing_export_v1_0A`" in query["query"]
    assert query["queryParameters"][1]["parameterValue"] == {
        "arrayValues": [{"value": "20261101-1-1"}]
    }


def test_a_submission_is_billed_with_all_its_attempts_a_job_alone(
    services: Emulator, session: Session, capsys: Capture
) -> None:
    sent = [
        Attempt(
            "l4x4",
            "my-proj",
            region,
            4.6,
            "gs://b/x",
            "SUCCEEDED",
            f"projects/1/{region}/7",
            "",
            12.4,
        )
        for region in ("us-central1", "us-east4")
    ]
    Submission("20261101-1", sent).write()
    services.billed = [["20261101-1-1", "USD", "12.4"], ["20261101-1-2", "USD", "12.4"]]
    for run, lines in (("20261101-1", 2), ("projects/1/us-east4/7", 1)):
        assert bill.main([run, TABLE], session) == 0
        shown = capsys.readouterr().out.splitlines()
        assert len(shown) == lines
        assert shown[-1].startswith(
            "projects/1/us-east4/7 (l4x4): estimated 12.40, billed 12.40, +0.0 %"
        )
    assert bill.main(["projects/1/us-east4/7", TABLE, "--json"], session) == 0
    job = {"job": "projects/1/us-east4/7", "submission": "20261101-1-2", "tier": "l4x4"}
    assert document(capsys)["jobs"] == [{**job, "estimated_usd": 12.4, "billed_usd": 12.4}]


def test_a_table_that_is_none_and_a_run_of_elsewhere_are_refused(
    session: Session, services: Emulator
) -> None:
    for flags, line in (
        (["x", "--table=p.d.t` --"], "write PROJECT.DATASET.gcp_billing"),
        (["x", TABLE], "is not recorded in this folder: give its name, display name, number"),
    ):
        with refused(line):
            bill.main(flags, session)
    assert services.requests == []
    services.faults = [Fault(CATALOG, 401)]
    with pytest.raises(
        UserError,
        match=r"^the Cloud Billing Catalog: not logged in, .* \(401\): run `gcloud auth [a-z -]+`$",
    ):
        asked(session)
    submitted()
    services.faults = [Fault("POST .*/queries", 403)]
    with refused("needs roles/bigquery.jobUser"):
        bill.main(["20261101-1", TABLE], session)
