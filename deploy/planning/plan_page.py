"""Makes plan.html: hours against USD of all offers, what each GPU needs and has, the table. One file, no scripts."""

import html
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.planning.forecast import Forecast
from deploy.planning.offers import STRATEGIES
from deploy.planning.plan_table import TITLES, PlanTable, Wish
from deploy.planning.tier_memory import GIB
from deploy.report.html_page import html_table, items, page
from deploy.report.plots import name_points, scale, svg
from deploy.report.table import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEMPLATE = Path(__file__).with_name("plan.html")
_MARKS = {"STANDARD": ("o", "#010210"), "SPOT": ("s", "#010211"), "FLEX_START": ("^", "#010212")}  # --c10 … of the page


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
    """Draws every offer with its intervals; a line joins those that no other beats, each tier named once."""
    for strategy, (mark, colour) in _MARKS.items():
        some = [offer for _, offer in table.offers if offer.strategy == strategy]
        for offer in some:
            axes.errorbar(
                offer.hours.middle, offer.usd.middle, fmt=mark, color=colour, markersize=5, elinewidth=0.6,
                label=STRATEGIES[strategy] if offer is some[0] else None,
                xerr=[[offer.hours.middle - offer.hours.low], [offer.hours.high - offer.hours.middle]],
                yerr=[[offer.usd.middle - offer.usd.low], [offer.usd.high - offer.usd.middle]],
            )  # fmt: skip
    best = sorted((table.offers[index] for index in table.efficient), key=lambda pair: pair[1].hours.middle)
    places = [(offer.hours.middle, offer.usd.middle) for _, offer in best]
    axes.plot(*zip(*places, strict=True), color="#010201", linewidth=1, zorder=1)
    axes.set(xlabel="hours", ylabel="USD")
    scale(axes, "x", [value for _, offer in table.offers for value in (offer.hours.low, offer.hours.high)])
    scale(axes, "y", [value for _, offer in table.offers for value in (offer.usd.low, offer.usd.high)])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9)
    named = {forecast.tier: place for (forecast, _), place in zip(reversed(best), reversed(places), strict=True)}
    all_places = [(offer.hours.middle, offer.usd.middle) for _, offer in table.offers]
    name_points(axes, [(place, tier) for tier, place in named.items()], all_places)


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
