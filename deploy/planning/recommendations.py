"""Answers in a few lines what a plan is asked: which tier is the cheapest and the fastest, and whether more GPUs pay.

Tiers are ranked by their middle values: those of one graph err the same way, so that their intervals rank nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from deploy.planning.forecast import BY_CPU, Forecast
from deploy.planning.step_time import CONSTANTS, Interval
from deploy.planning.strategy_costs import PricedEstimate
from deploy.planning.tier_memory import FITS, GIB, TOO_LARGE, Fit
from deploy.report.formatting import figures
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import STRATEGIES

Choice = tuple[Forecast, PricedEstimate]
Measure = Callable[[PricedEstimate], Interval]
hours_of: Measure = attrgetter("hours")
usd_of: Measure = attrgetter("usd")
EQUAL = 1.05  # so many times as much is as cheap, or as fast, where the other measure is better
# How many times as fast, or as dear, more devices are to be at least, or at most, to be worth it.
FASTER, DEARER = 1.25, 1.25
MOST_REASONS = 3  # of tiers without a time or a price


class Answer(NamedTuple):
    """Holds what is asked, in a word or two, and the answer on a line."""

    question: str
    text: str


def answers(
    forecasts: Sequence[Forecast], offers: Sequence[Choice], within_hours: float | None, budget_usd: float | None
) -> Iterator[Answer]:
    """Yields the answers, first to what was asked; `offers`: all of them, the cheapest first."""
    if len(forecasts) == 1 and (fit := forecasts[0].fit):
        yield Answer("fits?", _fit(fit))
    if not offers:
        fits = [(forecast.fit, forecast.tier) for forecast in forecasts if forecast.fit]
        if len(forecasts) > 1 and fits and all(fit.verdict == TOO_LARGE for fit, _ in fits):
            batch, tier = max((fit.largest_batch, tier) for fit, tier in fits)
            yield Answer("fits?", f"no tier: the largest global batch that fits is {batch:,}, on {tier}")
        else:
            others = [each for each in forecasts if not each.fit or each.fit.verdict != TOO_LARGE]
            yield from (Answer(each.tier, each.problems[0]) for each in others[:MOST_REASONS] if each.problems)
        return
    cheapest, fastest = _best(offers, usd_of, hours_of), _best(offers, hours_of, usd_of)
    if within_hours is not None:
        least = f"none: the fastest takes at least {span(min(offer.hours.low for _, offer in offers))}"
        within = _within(offers, hours_of, within_hours, usd_of)
        yield Answer(f"within {span(within_hours)}", within or least)
    if budget_usd is not None:
        least = f"none: the cheapest costs at least {dollars(min(offer.usd.low for _, offer in offers))} USD"
        yield Answer(f"for {dollars(budget_usd)} USD", _within(offers, usd_of, budget_usd, hours_of) or least)
    yield Answer("cheapest", _line(cheapest))
    yield Answer("fastest", _line(fastest))
    for problem, count in Counter(each.problems[0] for each in forecasts if each.problems and not each.step).items():
        if 2 * count >= len(forecasts):
            yield Answer("not timed", f"{count} tiers: {problem}")
    yield from _more_devices(offers)
    forecast, _ = cheapest
    if forecast.step and forecast.seconds:
        training = forecast.step.middle * forecast.steps
        installing = forecast.install_seconds.middle / 3600
        parts = [f"{span(installing)} installing (own image: 0)"] if installing else []
        parts.append(f"{span((forecast.seconds.middle - training) / 3600)} starting")
        each = f"{figures(1e3 * forecast.step.middle, 2)} ms a step"
        yield Answer("the time", f"{', '.join(parts)}, {span(training / 3600)} training at {each}")
        low, high = (figures(end / forecast.step.middle, 2) for end in (forecast.step.low, forecast.step.high))
        known = "as on an H100" if forecast.kind.startswith(CONSTANTS.card) else "by rates alone"
        known = "by steps on this CPU" if forecast.basis == BY_CPU else known
        surer = f"{known}; surer: --measure={forecast.tier.partition('@')[0]}"
        basis = f"measured on {forecast.measured}" if forecast.measured else surer
        yield Answer("how sure?", f"a step may take {low} to {high} x as long, {basis}")


def _best(offers: Sequence[Choice], measure: Measure, other: Measure) -> Choice:
    """Returns the offer with the least by its middle value; of those that are equal, the least by the other measure."""
    least = min(measure(offer).middle for _, offer in offers)
    equal = [choice for choice in offers if measure(choice[1]).middle <= EQUAL * least]
    return min(equal, key=lambda choice: other(choice[1]).middle)


def _within(offers: Sequence[Choice], limited: Measure, most: float, measure: Measure) -> str:
    """Returns the best offer that is surely, or perhaps, within a limit; "" if there is none."""
    for end, doubt in (("high", ""), ("middle", "perhaps ")):
        if within := [choice for choice in offers if getattr(limited(choice[1]), end) <= most]:
            return doubt + _line(_best(within, measure, limited))
    return ""


def _more_devices(offers: Sequence[Choice]) -> Iterator[Answer]:
    """Yields whether the most devices of the cheapest kind that has several numbers of them pay against the fewest."""
    kinds: dict[tuple[str, str, str], list[Choice]] = {}
    for forecast, offer in offers:
        if forecast.kind not in load_machines().accelerators:
            continue
        place = forecast.tier.partition("@")[2]
        kinds.setdefault((forecast.kind, offer.strategy, place), []).append((forecast, offer))
    for choices in kinds.values():
        (few, least), *_, (many, most) = sorted(choices * 2, key=lambda choice: choice[0].devices)
        if few.devices < many.devices:
            faster, dearer = least.hours.middle / most.hours.middle, most.usd.middle / least.usd.middle
            verdict = "no" if faster < FASTER else "yes" if dearer <= DEARER else "only in a hurry"
            gain = f"{faster:.1f} x as fast as {few.tier} for {dearer:.1f} x the money"
            yield Answer(f"{many.devices} GPUs?", f"{verdict}: {many.tier} is {gain}")
            return


def _fit(fit: Fit) -> str:
    needed = f"needs {fit.needed.low / GIB:.1f} - {fit.needed.high / GIB:.1f} of {fit.available / GIB:.1f} GiB"
    verdict = {FITS: "yes", TOO_LARGE: "no"}.get(fit.verdict, "perhaps")
    option = f"; this one with --{fit.options[0].name}={fit.options[0].value}" if fit.options else ""
    return f"{verdict}: {needed}; up to a batch of {fit.largest_batch:,}{option}"


def _line(choice: Choice) -> str:
    name = f"{choice[0].tier} {STRATEGIES[choice[1].strategy]}"
    return f"{name:<20}  {_ranged(choice[1].usd, dollars, ' USD'):<28}  {time_of(choice[1])}"


def time_of(offer: PricedEstimate) -> str:
    """Formats the time of a job as `7 min (4 - 12)`."""
    unit, hours = _unit(offer.hours.middle)
    return _ranged(offer.hours.times(1 / hours), _count, f" {unit}")


def usd_words(offer: PricedEstimate) -> str:
    """Formats the money of a job as `0.05 (0.03 - 0.09)`."""
    return _ranged(offer.usd, dollars)


def span(hours: float) -> str:
    """Formats a time as people say it: `45 s`, `7 min`, `3.5 h`, `5 days`."""
    unit, of_unit = _unit(hours)
    return f"{_count(hours / of_unit)} {unit}"


def _unit(hours: float) -> tuple[str, float]:
    """Returns the unit in which a time is said, and its hours."""
    units = (("s", 1 / 3600, 59.5), ("min", 1 / 60, 100), ("h", 1.0, 100))
    return next(((name, unit) for name, unit, most in units if hours < most * unit), ("days", 24.0))


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 5 or value == round(value) else f"{value:.1f}"


def dollars(value: float) -> str:
    """Formats USD: `1,234`, `12.30`, `0.004`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value >= 0.01 else figures(value, 1)


def _ranged(value: Interval, text: Callable[[float], str], unit: str = "") -> str:
    return f"{text(value.middle)}{unit} ({text(value.low)} - {text(value.high)})"
