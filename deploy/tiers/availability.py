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


def check_region(tier: Tier, gcp: GcpConfig) -> None:
    """Raises NoMachines if neither of Google's two pages has the tier's accelerator in the region."""
    accelerator = load_machines().accelerators.get(tier.accelerator_type)
    regions = [*itertools.chain(accelerator.regions, *accelerator.one_page.values())] if accelerator else [gcp.region]
    if gcp.region not in regions:
        raise NoMachines(
            f"region={gcp.region} has no {tier.accelerator_type} for training: use --region= with one of "
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


def _continent(location: str) -> str:
    word = re.split(r"[-\d]", location.lower())[0]
    return {"us": "northamerica", "nam": "northamerica", "eu": "europe", "eur": "europe"}.get(word, word)
