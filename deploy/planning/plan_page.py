"""Makes plan.html: hours against USD of all offers, what each GPU needs and has, the table. One file, no scripts."""

import html
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.planning.forecast import Forecast
from deploy.planning.offers import STRATEGIES
from deploy.planning.plan_table import TITLES, PlanTable, Wish
from deploy.planning.tier_memory import GIB
from deploy.report.html_page import html_table, items, page
from deploy.report.plots import INK, LOOKS, SOFT, legend_above, scale, svg, tier_label
from deploy.report.table import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEMPLATE = Path(__file__).with_name("plan.html")
_MARKS = {"STANDARD": "o", "SPOT": "s", "FLEX_START": "^"}


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
    """Draws every offer with its intervals; a line joins those that no other beats, whose tiers have colours."""
    best = [
        table.offers[index] for index in sorted(table.efficient, key=lambda index: table.offers[index][1].hours.middle)
    ]
    colours = {
        tier: LOOKS[index % 8]["color"] for index, tier in enumerate(dict.fromkeys(pair[0].tier for pair in best))
    }
    for strategy, mark in _MARKS.items():
        if any(offer.strategy == strategy for _, offer in table.offers):
            axes.plot([], [], mark, color=INK, label=STRATEGIES[strategy])
    for tier, colour in colours.items():
        axes.plot([], [], color=colour, label=tier_label(tier))
    for choice in table.offers:
        (forecast, offer), hours, usd = choice, choice[1].hours, choice[1].usd
        axes.errorbar(
            hours.middle, usd.middle, fmt=_MARKS[offer.strategy], markersize=5, elinewidth=0.6,
            color=colours[forecast.tier] if choice in best else SOFT, zorder=3 if choice in best else 2,
            xerr=[[hours.middle - hours.low], [hours.high - hours.middle]],
            yerr=[[usd.middle - usd.low], [usd.high - usd.middle]],
        )  # fmt: skip
    axes.plot(
        [offer.hours.middle for _, offer in best], [offer.usd.middle for _, offer in best], color=SOFT, linewidth=1,
        zorder=1,
    )  # fmt: skip
    axes.set(xlabel="hours", ylabel="USD")
    scale(axes, "x", [value for _, offer in table.offers for value in (offer.hours.low, offer.hours.high)])
    scale(axes, "y", [value for _, offer in table.offers for value in (offer.usd.low, offer.usd.high)])
    legend_above(axes)


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
