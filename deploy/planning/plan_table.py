"""Formats a plan of all tiers: for the terminal, as Markdown and as JSON, and the sentences about it."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deploy.planning.forecast import BY_GRAPH, BY_RUNS, START_SECONDS, Forecast
from deploy.planning.gpu_constants import CONSTANTS
from deploy.planning.interval import Interval
from deploy.planning.strategy_costs import PREEMPTIONS_PER_HOUR, RESTART_SECONDS, STRATEGIES, Offer
from deploy.planning.tier_memory import FRAGMENTS, GIB, NEAR, TOO_LARGE
from deploy.report.plots import pareto_front
from deploy.report.text_tables import figures, markdown_table, money, terminal_table
from deploy.tiers.machine_table import load_machines
from trainer.base.run_files.plan_file import StepPlan

Choice = tuple[Forecast, Offer]
Measure = Callable[[Offer], Interval]
MOST_DOUBT, _TRIED = 0.25, 50  # a half-width from which a trial is proposed, and its steps
TITLES = ("tier", "strategy", "fits", "GiB of a GPU", "largest batch", "ms/step", "hours", "USD", "efficient")
_TEXTS = 3  # of the titles: texts, not numbers


@dataclass(frozen=True)
class PlanTable:
    """Holds the forecasts of all tiers, and every offer of them, the cheapest first.

    `forecasts`: of each tier, "TIER@REGION" where regions were planned; `names`: of each tier, as `submit` takes it.
    """

    plan: StepPlan
    forecasts: Sequence[Forecast]
    about: str  # what is trained
    assumed: Sequence[str]  # of the runs that times come from
    within_hours: float | None = None  # the most hours and USD that the user asked for
    budget_usd: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def offers(self) -> list[Choice]:
        """Returns every offer with its tier, the cheapest first."""
        pairs = [(forecast, offer) for forecast in self.forecasts for offer in forecast.offers]
        return sorted(pairs, key=lambda pair: (pair[1].usd.middle, pair[1].hours.middle, pair[0].tier))

    @cached_property
    def efficient(self) -> set[int]:
        """Returns the places in `offers` of those that no other beats in hours and in USD."""
        return set(pareto_front([(offer.hours.middle, offer.usd.middle) for _, offer in self.offers]))

    def place(self, forecast: Forecast) -> tuple[str, str]:
        """Returns the tier of a forecast as `submit` takes it, and its region; "" for any."""
        tier, _, region = forecast.tier.partition("@")
        return self.names.get(tier, tier), region

    def cells(self) -> list[list[str]]:
        """Returns a row for each offer, then one for each tier without any."""
        rows = [_cells(forecast, offer, index in self.efficient) for index, (forecast, offer) in enumerate(self.offers)]
        return rows + [_cells(forecast, None, False) for forecast in self.forecasts if not forecast.offers]

    def to_terminal(self) -> str:
        """Returns columns of text."""
        return terminal_table(TITLES, self.cells(), _TEXTS)

    def to_markdown(self) -> str:
        """Returns the table with everything that is said about it."""
        lines = [*self.sentences(), *self.notes()]
        return f"{self.about}\n\n{markdown_table(TITLES, self.cells(), lines, _TEXTS)}"

    def to_json(self) -> str:
        """Returns every number."""
        content: dict[str, Any] = {
            "about": self.about, "sentences": [*self.sentences()], "notes": [*self.notes()],
            "tiers": [dataclasses.asdict(forecast) for forecast in self.forecasts],
        }  # fmt: skip
        return json.dumps(content, indent=2) + "\n"

    def sentences(self) -> Iterator[str]:
        """Yields what the user wants to know first."""
        if not self.offers:
            yield _why_none(self.forecasts)
            return
        by_time = sorted(self.offers, key=lambda pair: pair[1].hours.middle)
        yield _best("The cheapest", self.offers, lambda offer: offer.usd)
        yield _best("The fastest", by_time, lambda offer: offer.hours)
        yield from _worth(self.forecasts)
        yield from self._trial()
        if self.within_hours is not None:
            least = f"the fastest takes at least {figures(min(offer.hours.low for _, offer in self.offers))} hours"
            wish = f"The cheapest that ends within {figures(self.within_hours)} hours"
            yield _wished(
                wish, self.offers, lambda offer: offer.usd, lambda offer: offer.hours, self.within_hours, least
            )
        if self.budget_usd is not None:
            least = f"the cheapest costs at least {money(min(offer.usd.low for _, offer in self.offers))}"
            wish = f"The fastest for {money(self.budget_usd)}"
            yield _wished(wish, by_time, lambda offer: offer.hours, lambda offer: offer.usd, self.budget_usd, least)

    def _trial(self) -> Iterator[str]:
        """Yields what measures the cheapest and the fastest tier if their times are not known well, and its cost.

        Both as the command would run them: in one region, each under the strategy of its file.
        """
        _, region = self.place(self.offers[0][0])
        runs = [
            pair for pair in self.offers if pair[1].strategy == pair[0].strategy and self.place(pair[0])[1] == region
        ]
        if not runs:
            return
        tried = {self.place(pair[0])[0]: pair for pair in (runs[0], min(runs, key=lambda pair: pair[1].hours.middle))}
        steps = [forecast.step for forecast, _ in tried.values() if forecast.step]
        if all(step.half_width <= MOST_DOUBT for step in steps):
            return
        usd = sum(_trial_usd(*pair) for pair in tried.values())
        if usd > self.offers[0][1].usd.middle / 2:  # the run itself tells it for little more
            return
        widest = max(steps, key=lambda step: step.half_width)
        place = f" --region={region}" if region else ""
        yield (f"A step may take {widest.low / widest.middle:.2g} to {widest.high / widest.middle:.2g} times as long: "
               f"try it: `python -m deploy compare {' '.join(tried)} --on=vertex{place} --steps={_TRIED} …`, with the "
               f"flags of this plan but --epochs, costs about {money(usd)}.")  # fmt: skip

    def notes(self) -> Iterator[str]:
        """Yields how the numbers were made, what is assumed, and why one is missing."""
        table, memory = load_machines(), self.plan.memory
        bases = {forecast.basis for forecast in self.forecasts}
        yield (f"Memory: measured on this machine's CPU with {', '.join(map(str, memory.measured_rows))} rows; "
               f"up to {memory.worst_order:.2f} x as much in another order of operations, {FRAGMENTS:g} x that with "
               f"fragments. {CONSTANTS.source.capitalize()} of a GPU: "
               f"{CONSTANTS.context_gib:g} GiB for CUDA, {CONSTANTS.workspace_gib:g} GiB of workspaces, "
               f"{CONSTANTS.nccl_gib:g} GiB for NCCL.")  # fmt: skip
        if BY_GRAPH in bases:
            yield ("Times from the graph alone are a band, not bounds: FLOPs, bytes and operations at the rates of "
                   "data sheets, no GPU was measured. --from= a short run on one tier narrows them.")  # fmt: skip
        if BY_RUNS in bases:
            yield from self.assumed
        yield (f"Prices are estimates of {table.date} for {table.region} unless set by --prices or --price_per_hour; "
               "Vertex AI's fee is in them, for spot by inference. The time to get machines is not included, nor are "
               "saving and evaluation where no run shows them.")  # fmt: skip
        installing = [forecast.install_seconds for forecast in self.forecasts if forecast.install_seconds.middle]
        if installing:
            most = max(installing, key=lambda seconds: seconds.middle).times(1 / 60)
            yield (f"Hours and USD include the minutes in which each job installs TensorFlow first, a "
                   f"guess: up to {ranged(most)}; an own image (python -m deploy image) saves them.")  # fmt: skip
        yield (f"Spot: {PREEMPTIONS_PER_HOUR:g} preemptions an hour, a guess, each of which loses half of the time "
               f"between checkpoints, and {RESTART_SECONDS / 60:.0f} minutes; up to twice as many.")  # fmt: skip
        tiers: dict[str, list[str]] = {}
        for forecast in self.forecasts:
            for problem in forecast.problems:
                tiers.setdefault(problem, []).append(forecast.tier)
        yield from (f"{', '.join(names)}: {problem}" for problem, names in tiers.items())
        near = [forecast.tier for forecast in self.forecasts if forecast.fit and forecast.fit.verdict == NEAR]
        if near:
            yield f"{', '.join(near)}: whether it fits is within the error of the prediction."


def _why_none(forecasts: Sequence[Forecast]) -> str:
    """Returns why there is no offer at all, and the largest batch that fits, if only that is missing."""
    fits = [forecast.fit for forecast in forecasts if forecast.fit]
    if not fits or any(fit.verdict != TOO_LARGE for fit in fits):
        return "No tier has both a time and a price."
    batch, tier = max((forecast.fit.largest_batch, forecast.tier) for forecast in forecasts if forecast.fit)
    return f"It fits no tier: the largest global batch that fits is {batch:,}, on {tier}."


def _worth(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Yields a sentence for each kind of device: what more of them save in time, and cost, against the fewest."""
    by_kind: dict[tuple[str, str], list[Choice]] = {}
    for forecast in forecasts:
        for offer in forecast.offers:
            by_kind.setdefault((forecast.kind, offer.strategy), []).append((forecast, offer))
    kinds = set()
    for strategy in STRATEGIES:
        for (kind, offered), pairs in by_kind.items():
            if offered != strategy or kind in kinds or len(pairs) < 2:
                continue
            kinds.add(kind)
            (first, least), *others = sorted(pairs, key=lambda pair: (pair[0].devices, pair[1].usd.middle))
            ratios = (
                f"{forecast.tier} {least.hours.middle / offer.hours.middle:.2f} x as fast for "
                f"{offer.usd.middle / least.usd.middle:.2f} x the money"
                for forecast, offer in others
            )
            yield f"Against {first.tier} ({STRATEGIES[strategy]}), by the middle values: {', '.join(ratios)}."


def _best(wish: str, choices: Sequence[Choice], measure: Measure, doubt: str = "") -> str:
    """Returns the first of the sorted choices, or the cheapest of those whose intervals reach to it: they are equal."""
    least = measure(choices[0][1]).middle
    equal = [choice for choice in choices if measure(choice[1]).low <= least]
    best = min(equal, key=lambda choice: choice[1].usd.middle)
    names = [f"{forecast.tier} as {STRATEGIES[offer.strategy]}" for forecast, offer in equal if offer is not best[1]]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    others = f"; within its interval, and so equal: {', '.join(names[:4])}{more}" if names else ""
    return f"{wish}: {doubt}{_offered(*best)}{others}."


def _trial_usd(forecast: Forecast, offer: Offer) -> float:
    """Returns what a short run costs, with its start."""
    steps = forecast.step.times(_TRIED).middle if forecast.step else 0.0
    return (forecast.install_seconds.plus(START_SECONDS).middle + steps) / 3600 * offer.usd_per_hour


def _wished(
    wish: str, choices: Sequence[Choice], measure: Measure, limited: Measure, most: float, least: str
) -> str:  # fmt: skip
    """Returns the best of the sorted choices that are surely, or perhaps, within `most`; `least` if there is none."""
    for attribute, doubt in (("high", ""), ("middle", "none surely; perhaps ")):
        if within := [choice for choice in choices if getattr(limited(choice[1]), attribute) <= most]:
            return _best(wish, within, measure, doubt)
    return f"{wish}: none; {least}."


def _offered(forecast: Forecast, offer: Offer) -> str:
    hours, usd = ranged(offer.hours), ranged(offer.usd, money)
    return f"{forecast.tier} as {STRATEGIES[offer.strategy]}, {hours} hours, {usd}"


def ranged(value: Interval, text: Any = figures) -> str:
    """Formats `1.20 (1.00 - 1.50)`."""
    return f"{text(value.middle)} ({text(value.low)} - {text(value.high)})"


def _cells(forecast: Forecast, offer: Offer | None, efficient: bool) -> list[str]:
    fit = forecast.fit
    needs = f"{fit.needed.low / GIB:.1f} - {fit.needed.high / GIB:.1f} of {fit.available / GIB:.1f}" if fit else ""
    return [
        forecast.tier, STRATEGIES[offer.strategy] if offer else "", fit.verdict if fit else "not known", needs,
        f"{fit.largest_batch:,}" if fit else "", ranged(forecast.step.times(1e3)) if forecast.step else "",
        ranged(offer.hours) if offer else "", ranged(offer.usd, money) if offer else "", "*" if efficient else "",
    ]  # fmt: skip
