"""Reads the project, the region and the bucket of a job from flags or from gcloud's configuration,
and checks them."""

import math
import re
from dataclasses import dataclass
from itertools import chain

from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.storage import parse
from trainer.base.storage.login import gcloud_property


@dataclass(frozen=True)
class GcpConfig:
    """Holds where a job runs: the project ("" if nothing is sent), the region, the bucket.

    The bucket is gs://NAME or gs://NAME/PREFIX, without a trailing slash.
    """

    project: str
    region: str
    bucket: str


def read_gcp_config(project: str, region: str, bucket: str) -> GcpConfig:
    """Returns where a job runs, from flags or, if these are empty, from gcloud.

    The project may be missing. Raises UserError for a missing region or bucket, or the first
    malformed value.
    """
    region = needed_region(region)
    bucket = checked_address("bucket", bucket)
    return GcpConfig(read_project(project), region, bucket)


def needed_region(flag: str) -> str:
    """Returns the region of the flag, or else gcloud's. Raises UserError without a valid one."""
    region = read_region(flag)
    if not region:
        raise UserError(
            "region is missing: use --region=us-central1, or `gcloud config set ai/region"
            " us-central1`"
        )
    return checked_region(region)


def regions_in(text: str) -> list[str]:
    """Returns the regions in "a,b", each once; [""] for "". Raises UserError for a bad one."""
    return (
        [checked_region(name.strip()) for name in dict.fromkeys(text.split(","))] if text else [""]
    )


def read_region(flag: str) -> str:
    """Returns the region of the flag, or else gcloud's, without a check; "" if neither is set."""
    return flag or gcloud_property("ai", "region") or gcloud_property("compute", "region")


def read_project(flag: str) -> str:
    """Returns the project of the flag, or else gcloud's; "" without one.

    Raises UserError if it is malformed.
    """
    project = flag or gcloud_property("core", "project")
    # An ID, with a domain in old ones (example.com:my-project), or a number.
    if project and not re.fullmatch(r"[a-z0-9][a-z0-9.:-]*", project):
        raise UserError(
            f"project={project}: use its ID, of lower-case letters, digits and hyphens, as"
            " my-project-123: `gcloud projects list` shows it"
        )
    return project


def needed_project(flag: str) -> str:
    """Returns the project of the flag, or else gcloud's. Raises UserError if neither is set."""
    project = read_project(flag)
    if not project:
        raise UserError("project is missing: use --project=ID, or `gcloud config set project ID`")
    return project


def checked_region(region: str) -> str:
    """Returns `region`. Raises UserError unless Vertex AI trains in this region."""
    regions = load_machines().regions
    if region not in regions:
        raise UserError(
            f"region={region}: not a region of Vertex AI training{nearest(region, regions)} `python"
            " -m deploy machines --all` lists them"
        )
    return region


def checked_address(flag: str, address: str) -> str:
    """Returns a flag's gs:// address without a trailing slash. Raises UserError for others."""
    if not address:
        raise UserError(
            f"{flag} is missing: use --{flag}=gs://NAME, a bucket of yours in the job's region"
        )
    parsed = parse(address, flag)
    if parsed is None or "//" in address.removeprefix("gs://"):
        raise UserError(
            f"{flag}={address}: an address looks like gs://bucket or gs://bucket/folder"
        )
    return str(parsed).rstrip("/")


class NoMachines(UserError):
    """Reports that a region does not have the tier's accelerator; another region may have it."""


def check_region(tier: Tier, gcp: GcpConfig) -> None:
    """Raises NoMachines if Google lists no accelerator of the tier in the job's region."""
    accelerator = load_machines().accelerators.get(tier.accelerator_type)
    regions = (
        [*chain(accelerator.regions, *accelerator.one_page.values())]
        if accelerator
        else [gcp.region]
    )
    if gcp.region not in regions:
        raise NoMachines(
            f"region={gcp.region} has no {tier.accelerator_type} for training: use --region= with"
            f" one of {', '.join(regions)}"
        )


# USD for a GiB that moves between two locations of a continent, and since April 2023 also from a
# multi-region, such as US, to one of its regions:
# https://cloud.google.com/storage/pricing#network-buckets. 0.02 is in Infracost's examples, from
# Google's catalog; the page could not be read in November 2026. On other continents each pair has
# its own price.
_TRANSFER_USD = {"northamerica": 0.02, "europe": 0.02}
_DUAL_REGIONS = {
    "nam4": "us-central1 us-east1",
    "eur4": "europe-north1 europe-west4",
    "asia1": "asia-northeast1 asia-northeast2",
}


def transfer_usd_per_gib(bucket: str, region: str, location: str) -> float:
    """Returns the price of reading a GiB of the bucket: 0 in the same place, nan if unknown.

    `location`: the bucket's location, as Cloud Storage states it:
        https://cloud.google.com/storage/docs/locations. If it is empty, the location is not known,
        and the price is taken to be 0. Raises UserError if the bucket is on another continent.
    """
    place = location.lower()
    if place and _continent(place) != _continent(region):
        raise UserError(
            f"{bucket} is in {location}, the job would run in {region}: data would cross"
            " continents, slowly and at a price: use a bucket or a region of the same continent"
        )
    inside = place in ("", region) or region in _DUAL_REGIONS.get(place, "").split()
    return 0.0 if inside else _TRANSFER_USD.get(_continent(region), math.nan)


def _continent(location: str) -> str:
    word = re.split(r"[-\d]", location)[0]
    return {"us": "northamerica", "nam": "northamerica", "eu": "europe", "eur": "europe"}.get(
        word, word
    )
