"""Project, region and bucket: flags, gcloud's configuration, and names that cannot be."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from deploy.tiers.gcp_config import checked_address, checked_region, transfer_usd_per_gib
from tests.fixtures import Patch
from tests.support import refused
from trainer.base.storage.login import gcloud_property


def test_the_environment_wins_and_nothing_configured_is_empty(monkeypatch: Patch) -> None:
    folder = Path("../gcloud")
    assert gcloud_property("core", "project") == ""
    (folder / "configurations").mkdir(parents=True)
    (folder / "active_config").write_text("work\n")
    (folder / "configurations" / "config_work").write_text("[core]\nproject = mine\n")
    (folder / "configurations" / "config_home").write_text("[core]\nproject = other\n")
    assert gcloud_property("core", "project") == "mine"
    for name, value, project in (
        ("ACTIVE_CONFIG_NAME", "home", "other"),
        ("CORE_PROJECT", "given", "given"),
    ):
        monkeypatch.setenv(f"CLOUDSDK_{name}", value)
        assert gcloud_property("core", "project") == project


@pytest.mark.parametrize(
    ("location", "region", "usd"),
    [
        ("NAM4", "us-east1", 0),
        ("", "us-east1", 0),
        ("US", "us-central1", 0.02),
        ("NAM4", "us-east4", 0.02),
        ("EUROPE-WEST4", "europe-west1", 0.02),
        ("ASIA1", "asia-east1", math.nan),
    ],
)
def test_a_bucket_elsewhere_on_the_continent_has_a_price_a_gib(
    location: str, region: str, usd: float
) -> None:
    assert transfer_usd_per_gib("gs://abc", region, location) == pytest.approx(usd, nan_ok=True)


OTHER_CONTINENT = "use a bucket or a region of the same continent"


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (
            partial(checked_address, "bucket", "my-bucket"),
            "an address looks like gs://bucket or gs://bucket/folder",
        ),
        (partial(checked_region, "us-central1-a"), "did you mean 'us-central1'"),
        (partial(checked_region, "us"), "not a region of Vertex AI training"),
        (partial(transfer_usd_per_gib, "gs://abc", "us-central1", "EU"), OTHER_CONTINENT),
        (partial(transfer_usd_per_gib, "gs://abc", "europe-west4", "ME-CENTRAL2"), OTHER_CONTINENT),
    ],
)
def test_places_that_cannot_be_are_refused(read: Callable[[], object], line: str) -> None:
    with refused(line):
        read()
