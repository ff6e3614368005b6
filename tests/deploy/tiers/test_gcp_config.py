"""Project, region and bucket: flags, gcloud's configuration, and names that cannot be."""

import math
from pathlib import Path

import pytest

from deploy.tiers.gcp_config import checked_address, checked_region, transfer_usd_per_gib
from tests.deploy.conftest import needs_gcloud, run
from tests.support import refused
from trainer.base.errors import UserError
from trainer.base.storage.login import gcloud_property


@needs_gcloud
def test_gclouds_configuration_is_read_as_gcloud_reads_it(tmp_path: Path, cloud: object) -> None:
    set_property = ["gcloud", "config", "set", "--quiet"]
    assert run([*set_property, "ai/region", "europe-west4"]).returncode == 0
    assert gcloud_property("ai", "region") == "europe-west4"
    assert gcloud_property("core", "project") == "my-proj"  # from the environment
    assert gcloud_property("ai", "endpoint") == ""


def test_the_environment_wins_and_nothing_configured_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "gcloud"
    environment = {"CLOUDSDK_CONFIG": str(folder)}
    assert gcloud_property("core", "project", environment) == ""
    (folder / "configurations").mkdir(parents=True)
    (folder / "active_config").write_text("work\n")
    (folder / "configurations" / "config_work").write_text("[core]\nproject = mine\n")
    (folder / "configurations" / "config_home").write_text("[core]\nproject = other\n")
    assert gcloud_property("core", "project", environment) == "mine"
    assert gcloud_property("core", "project", environment | {"CLOUDSDK_ACTIVE_CONFIG_NAME": "home"}) == "other"
    assert gcloud_property("core", "project", environment | {"CLOUDSDK_CORE_PROJECT": "given"}) == "given"


@pytest.mark.parametrize(
    "address", ["gs://abc", "gs://abc/", "gs://a.b-c_d9/x/y", "gs://my-bucket/a b/", "gs://1ab", "gs://google-data"]
)
def test_good_addresses(address: str) -> None:
    assert checked_address("bucket", address) == address.rstrip("/")


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("", "bucket is missing: use --bucket=gs://NAME"),
        ("my-bucket", "an address looks like gs://bucket or gs://bucket/folder"),
        ("gs:/my-bucket/x", "did you mean gs://my-bucket/x?"),
        ("gs://my-bucket//x", "an address looks like"),
        ("gs://-bucket", "with a letter or digit first and last"),
        ("gs://ab", "'ab' is not a valid bucket name: use 3 to 63 lower-case letters, digits"),
    ],
)
def test_addresses_that_cannot_be(address: str, line: str) -> None:
    with refused(line):
        checked_address("bucket", address)


@pytest.mark.parametrize(
    ("region", "line"), [("us-central1-a", "did you mean 'us-central1'"), ("us", "not a region of Vertex AI training")]
)
def test_regions_that_are_none(region: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        checked_region(region)


@pytest.mark.parametrize(("location", "region", "usd"), [
    ("US-CENTRAL1", "us-central1", 0), ("NAM4", "us-east1", 0), ("", "us-east1", 0),
    ("US", "us-central1", 0.02), ("NAM4", "us-east4", 0.02), ("EUROPE-WEST4", "europe-west1", 0.02),
    ("NORTHAMERICA-NORTHEAST1", "us-east1", 0.02), ("ASIA1", "asia-east1", math.nan),
])  # fmt: skip
def test_a_bucket_elsewhere_on_the_continent_has_a_price_a_gib(location: str, region: str, usd: float) -> None:
    assert transfer_usd_per_gib("gs://abc", region, location) == pytest.approx(usd, nan_ok=True)


@pytest.mark.parametrize(
    ("location", "region"), [("EU", "us-central1"), ("US-EAST1", "asia-east1"), ("ME-CENTRAL2", "europe-west4")]
)
def test_a_bucket_on_another_continent_is_refused(location: str, region: str) -> None:
    with pytest.raises(UserError, match="use a bucket or a region of the same continent"):
        transfer_usd_per_gib("gs://abc", region, location)
