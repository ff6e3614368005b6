"""Summarizes each tier: the values of MEASURES over its runs, compared with another tier, and why one is missing."""

from collections.abc import Mapping, Sequence

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
    rows = [
        TierSummary(group, collection.local, prices.get(group.name), collection.local and group.name not in usd)
        for group in collection.tiers
    ]
    _measure(rows, compared=False)
    _leave_out_other_quality(rows)
    for row in rows:
        row.base = rows[names.index(baseline or names[0])]
    _measure(rows, compared=True)
    for row in rows:
        empty = [measure for measure in measures.MEASURES if row.values[measure.key] is None]
        row.missing = {measure.key: reason for measure in empty if (reason := measure.reason(row))}
    return rows


def _measure(rows: Sequence[TierSummary], *, compared: bool) -> None:
    for measure in measures.MEASURES:
        for row in rows:
            if measure.compared == compared:
                row.values[measure.key] = measure.value(row)


def _leave_out_other_quality(rows: Sequence[TierSummary]) -> None:
    """Removes measures of images whose features, images or formulas are not those of the first tier that has some."""
    wanted = next((row.quality for row in rows if row.quality not in ("", measures.MIXED)), "")
    for row in rows:
        if row.quality != wanted:
            row.values |= dict.fromkeys(measures.QUALITY)
