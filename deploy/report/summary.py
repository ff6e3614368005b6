"""Summarizes each tier: the measures of its runs, compared with another tier."""

from collections.abc import Mapping

from deploy.report import measures
from deploy.report.collection import Collection
from deploy.report.tier_summary import TierSummary
from deploy.tiers.tier import check_tiers


def summarize(
    collection: Collection, baseline: str = "", usd_by_tier: Mapping[str, float] | None = None
) -> list[TierSummary]:
    """Returns a summary of each tier, compared with `baseline`, by default the first tier.

    `usd_by_tier`: prices of one hour of all machines, instead of those in a comparison. Raises UserError for an
    unknown tier.
    """
    names, usd = [group.name for group in collection.tiers], usd_by_tier or {}
    check_tiers([*([baseline] if baseline else []), *usd], names)
    prices = {group.name: group.tier.price_per_hour for group in collection.tiers if group.tier} | {**usd}
    local = collection.local
    rows = [
        TierSummary(group, measures.MEASURES, local, prices.get(group.name), local and group.name not in usd)
        for group in collection.tiers
    ]
    quality = next((row.quality for row in rows if row.quality not in ("", measures.MIXED)), "")
    for row in rows:
        row.base, row.wanted_quality = rows[names.index(baseline or names[0])], quality
    return rows
