"""Tests prices of the Billing Catalog, and what BigQuery's export says was billed."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from google.auth.credentials import AnonymousCredentials

from deploy.job.ledger import Attempt, Submission
from deploy.platform import rest
from deploy.tiers.machine_table import load_machines
from tests.deploy.conftest import ROOT, Command
from tests.deploy.emulator import Emulator, Fault
from tests.deploy.planted import content
from tests.deploy.platform.billing_services import BILL, COMPUTE, VERTEX, sku
from tests.fixtures import Patch

TABLE = "--table=my-proj.billing.gcp_billing_export_v1_0A"
FILE = Path("prices.yaml")
PRICES = ["prices", "--region=us-central1"]
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


def document(made: str) -> Any:
    """Returns the document of --json, checked by its schema."""
    found = json.loads(made)
    jsonschema.validate(found, content(ROOT / "docs" / "json.schema.json"))
    return found


def test_the_published_bill_is_the_catalogs_price_to_the_cent(
    services: Emulator, typed: Command
) -> None:
    shown = typed(*PRICES)
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
    assert price.spot is None
    assert not price.inferred


def test_a_region_without_any_price_is_refused_and_nothing_written(
    services: Emulator, refused: Command
) -> None:
    services.skus = {name: [] for name in services.skus}
    assert "a price there for none of " in refused(*PRICES)
    assert not FILE.exists()


def test_what_differs_from_the_table_is_told(services: Emulator, typed: Command) -> None:
    name = "Vertex AI: training/pipelines on Nvidia H100 80GB in Iowa"
    services.skus[VERTEX][0] = sku(name, 2 * 11.2660332, 0)
    line = "a3-highgpu-8g as list in us-central1: 191.793 (+88.7 %, table 101.665)"
    assert line in typed(*PRICES)
    made = document(typed(*PRICES, "--json"))
    assert line in made["differences"]
    assert made["prices"]["a3-highgpu-8g"]["list"] == pytest.approx(191.793, abs=1e-3)


@pytest.mark.parametrize(
    ("service", "text", "code"),
    [
        (VERTEX, "Vertex AI: Training/Pipelines on NVIDIA H100 80GB in Iowa 2", 0),
        (COMPUTE, "SSD backed Local Storage 2", 2),  # without it no machine has a price
    ],
)
def test_a_part_with_two_skus_has_no_price_and_their_names_are_told(
    services: Emulator, typed: Command, service: str, text: str, code: int
) -> None:
    services.skus[service].append(sku(text, 1.0, 99))
    (told,) = re.findall("a3-highgpu-8g: no price as list: .*", typed(*PRICES, code=code))
    assert f"2 SKUs: {text[:20]}" in told
    assert code or "list" not in yaml.safe_load(FILE.read_text())["a3-highgpu-8g"]


def submitted(*regions: str) -> None:
    """Records a submission with an attempt in each region."""
    sent = ("gs://b/x", "SUCCEEDED")
    attempts = [
        Attempt("l4x4", "my-proj", region, 4.6, *sent, f"projects/1/{region}/7", "", 12.4)
        for region in regions
    ]
    Submission("20261101-1", attempts).write()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [["20261101-1-1", "USD", "12.53"]],
            "projects/1/us-central1/7 (l4x4): estimated 12.40, billed 12.53, +1.0 %\n",
        ),
        ([], "estimated 12.40, no row with the label submission=20261101-1-1 yet"),
        ([["20261101-1-1", "EUR", "9"]], "is in EUR: only exports in USD"),
    ],
)
def test_what_was_billed_stands_beside_the_estimate(
    services: Emulator, rows: list[list[str]], said: str, typed: Command
) -> None:
    submitted("us-central1")
    services.billed = rows
    assert said in typed("bill", "20261101-1", TABLE, code=2 if "EUR" in said else 0)
    (query,) = services.queries
    assert "`my-proj.billing.gcp_billing_export_v1_0A`" in query["query"]
    labels = query["queryParameters"][1]["parameterValue"]
    assert labels == {"arrayValues": [{"value": "20261101-1-1"}]}


def test_a_submission_is_billed_with_all_its_attempts_a_job_alone(
    services: Emulator, typed: Command
) -> None:
    submitted("us-central1", "us-east4")
    services.billed = [["20261101-1-1", "USD", "12.4"], ["20261101-1-2", "USD", "12.4"]]
    name = "projects/1/us-east4/7"
    for run, lines in (("20261101-1", 2), (name, 1)):
        *_, last = shown = typed("bill", run, TABLE).splitlines()
        assert len(shown) == lines
        assert last.startswith(f"{name} (l4x4): estimated 12.40, billed 12.40, +0.0 %")
    (job,) = document(typed("bill", name, TABLE, "--json"))["jobs"]
    about = {"job": name, "submission": "20261101-1-2", "tier": "l4x4"}
    assert job == {**about, "estimated_usd": 12.4, "billed_usd": 12.4}


def test_a_table_that_is_none_and_a_run_of_elsewhere_are_refused(
    services: Emulator, refused: Command
) -> None:
    assert "write PROJECT.DATASET.gcp_billing" in refused("bill", "x", "--table=p.d.t` --")
    assert "is not recorded in this folder: give its name" in refused("bill", "x", TABLE)
    assert services.requests == []
    services.faults = [Fault(CATALOG, 401), Fault(CATALOG, 403, message="it failed")]
    error = refused(*PRICES)
    assert re.search(r"not logged in, .* \(401\): run `gcloud auth [a-z -]+`\n", error)
    assert "Catalog: it failed: enable cloudbilling.googleapis.com" in refused(*PRICES)
    submitted("us-central1")
    services.faults = [Fault("POST .*/queries", 403)]
    assert "needs roles/bigquery.jobUser" in refused("bill", "20261101-1", TABLE)
