"""Makes plan.html: hours against USD of all offers, what each GPU needs and has, the table. One file, no scripts."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.planning.forecast import Forecast
from deploy.planning.offers import STRATEGIES, Offer
from deploy.planning.plan_table import TITLES, Choice, PlanTable, Wish
from deploy.planning.tier_memory import GIB
from deploy.report.html_page import html_table, items, page
from deploy.report.plots import Point, name_points, scale, svg
from deploy.report.table import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEMPLATE = Path(__file__).with_name("plan.html")
_MARKS = {"STANDARD": "o", "SPOT": "s", "FLEX_START": "^"}
_COLOURS = {"STANDARD": "#010210", "SPOT": "#010211", "FLEX_START": "#010212"}  # --c10 … of the page


def to_html(table: PlanTable, wish: Wish) -> str:
    """Returns the page. Raises UserError if matplotlib is not installed."""
    return page(
        _TEMPLATE,
        title=html.escape(f"Plan: {table.about.partition(':')[0]}"),
        about=html.escape(table.about.partition(": ")[2]),
        sentences=items(table.sentences(wish)),
        chart=svg("Hours and USD of each tier", lambda axes: _draw(axes, table)) if table.offers else "",
        memory="\n".join(filter(None, map(_bar, table.forecasts))),
        table=html_table(TITLES, table.cells()),
        notes=items(table.notes()),
    )


def _draw(axes: "Axes", table: PlanTable) -> None:
    """Draws every offer with its intervals; those that no other beats have their names, and a line joins them."""
    offers = table.offers
    for strategy in STRATEGIES:
        some = [offer for _, offer in offers if offer.strategy == strategy]
        if some:
            _points(axes, some, strategy)
    best = sorted((offers[index] for index in table.efficient), key=lambda pair: pair[1].hours.middle)
    axes.plot(*zip(*(_place(offer) for _, offer in best), strict=True), color="#010201", linewidth=1, zorder=1)
    axes.set(xlabel="hours", ylabel="USD")
    scale(axes, "x", [value for _, offer in offers for value in (offer.hours.low, offer.hours.high)])
    scale(axes, "y", [value for _, offer in offers for value in (offer.usd.low, offer.usd.high)])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9)
    name_points(axes, chart_names(best), [_place(offer) for _, offer in offers])


def chart_names(best: Sequence[Choice]) -> list[tuple[Point, str]]:
    """Returns each place with its tier, and the strategy too if the tier has two places; marks that touch are one."""
    named: list[Choice] = []
    for forecast, offer in best:
        if not named or named[-1][0] is not forecast or not _touch(named[-1][1], offer):
            named.append((forecast, offer))
    tiers = [forecast.tier for forecast, _ in named]
    return [
        (
            _place(offer),
            f"{forecast.tier} {STRATEGIES[offer.strategy]}" if tiers.count(forecast.tier) > 1 else forecast.tier,
        )
        for forecast, offer in named
    ]


def _touch(first: Offer, other: Offer) -> bool:
    return all(math.isclose(*pair, rel_tol=0.05) for pair in zip(_place(first), _place(other), strict=True))


def _place(offer: Offer) -> Point:
    return offer.hours.middle, offer.usd.middle


def _points(axes: "Axes", some: Sequence[Offer], strategy: str) -> None:
    spans = [
        [[value.middle - value.low for value in values], [value.high - value.middle for value in values]]
        for values in ([offer.hours for offer in some], [offer.usd for offer in some])
    ]
    axes.errorbar(
        [offer.hours.middle for offer in some], [offer.usd.middle for offer in some], xerr=spans[0], yerr=spans[1],
        fmt=_MARKS[strategy], color=_COLOURS[strategy], markersize=5, elinewidth=0.6, label=STRATEGIES[strategy],
    )  # fmt: skip


def _bar(forecast: Forecast) -> str:
    """Returns a bar of what the tier's device needs, from the least to the most, of what it has."""
    if forecast.fit is None:
        return ""
    fit = forecast.fit
    low, high = (min(100.0, 100 * value / fit.available) for value in (fit.needed.low, fit.needed.high))
    words = f"{figures(fit.needed.middle / GIB)} of {figures(fit.available / GIB)} GiB"
    kind = fit.verdict.replace(" ", "-")
    return (
        f'<div class="memory {kind}"><span class="name">{html.escape(forecast.tier)}</span>'
        f'<span class="bar" role="img" aria-label="{html.escape(words)}"><i style="width: {low:.1f}%"></i>'
        f'<b style="width: {high - low:.1f}%"></b></span>'
        f'<span class="words">{html.escape(words)}, {fit.verdict}</span></div>'
    )
