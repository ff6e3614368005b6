"""Checks on the user's machine where a job may run: regions that have the tier's accelerator, and continents."""

import itertools
import re
from collections.abc import Iterator

from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError


class NoMachines(UserError):
    """Reports that a region does not have the tier's accelerator; another one may."""


def check_region(tier: Tier, gcp: GcpConfig) -> Iterator[str]:
    """Yields a warning if one of Google's two pages alone has the tier's accelerator in the region.

    Raises NoMachines if neither has it.
    """
    if not tier.accelerator_type:
        return
    accelerator = load_machines().accelerators[tier.accelerator_type]
    page = next((page for page, regions in accelerator.one_page.items() if gcp.region in regions), "")
    if page:
        yield (
            f"region={gcp.region}: only Google's page of {page} has {accelerator.name} there for training, its other "
            f"one has it in {', '.join(accelerator.regions)}"
        )
    elif gcp.region not in accelerator.regions:
        regions = itertools.chain(accelerator.regions, *accelerator.one_page.values())
        raise NoMachines(
            f"region={gcp.region} has no {accelerator.name} for training: use --region= with one of "
            f"{', '.join(regions)}"
        )


def other_prices(tier: Tier, region: str) -> Iterator[str]:
    """Yields a warning if the tier's price is that of another region."""
    table = load_machines()
    if tier.price.inferred and region != table.region:
        yield (
            f"no price for {region}: that of {table.region} is used: `python -m deploy prices --region={region}` asks "
            "Google, and writes a file for --prices="
        )


def check_continent(bucket: str, region: str, location: str) -> None:
    """Raises UserError if the bucket is on another continent than the region.

    `location`: the bucket's, as Cloud Storage states it, or empty if it is not known:
    https://cloud.google.com/storage/docs/locations
    """
    if location and _continent(location) != _continent(region):
        raise UserError(
            f"{bucket} is in {location}, the job would run in {region}: data would cross continents, slowly and at a "
            "price: use a bucket or a region of the same continent"
        )


def multi_regional(bucket: str, location: str) -> Iterator[str]:
    """Yields a warning for a bucket of several regions that Vertex AI's TensorBoard would read."""
    if location and not re.fullmatch(r"[a-z]+-[a-z]+\d+", location.lower()):
        yield (
            f"warning: {bucket} is in {location}, which is no single region, and the tier has a tensorboard: Google "
            "asks for a regional bucket, in the job's region"
        )


def _continent(location: str) -> str:
    word = re.split(r"[-\d]", location.lower())[0]
    return {"us": "northamerica", "nam": "northamerica", "eu": "europe", "eur": "europe"}.get(word, word)
