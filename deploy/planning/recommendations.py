"""Answers what users ask of a plan: which tier is the cheapest, which is the fastest, and whether
more GPUs pay.

Tiers are ranked by the middles of their intervals: predictions from one graph err in the same
direction, so that overlapping intervals do not make two tiers equal.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from deploy.planning.forecast import BY_CPU, Forecast, PricedEstimate
from deploy.planning.step_time import CONSTANTS, Interval
from deploy.planning.tier_memory import FITS, TOO_LARGE
from deploy.report.formatting import brief, dollars, figures, span, unit_of_time
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import STRATEGIES

Choice = tuple[Forecast, PricedEstimate]
Measure = Callable[[PricedEstimate], Interval]
hours_of: Measure = attrgetter("hours")
usd_of: Measure = attrgetter("usd")
# costs, or times, up to this factor of the lowest count as equal, and the other measure decides
EQUAL = 1.05
# More devices are worth it if they are at least FASTER times as fast and cost at most DEARER times
# as much.
FASTER = 1.25
DEARER = 1.25
MOST_REASONS = 3  # how many tiers without a time or a price get a line that says why


class Answer(NamedTuple):
    """Holds a question in a word or two, and its answer in a line."""

    question: str
    text: str


def likely(offers: Sequence[Choice]) -> Sequence[Choice]:
    """Returns the offers of tiers whose memory the run surely fits, or all if it surely fits
    none."""
    return [choice for choice in offers if _fits(choice)] or offers


def answers(
    forecasts: Sequence[Forecast],
    offers: Sequence[Choice],
    within_hours: float | None,
    budget_usd: float | None,
    here_hours: float | None = None,
    in_bfloat16: Sequence[Choice] = (),
) -> Iterator[Answer]:
    """Yields the answers to show below a plan, first those to the limits that the user gave.

    `offers`: each forecast with each of its prices, the cheapest first; `within_hours`,
        `budget_usd`: the limits; `here_hours`: what the run takes on this machine's CPU;
        `in_bfloat16`: as `offers`, at that precision.
    """
    offers = likely(offers)
    # Of one tier whether it fits; of several, why there is no offer.
    if len(forecasts) == 1 and (fit := forecasts[0].fit):
        verdict = {FITS: "yes", TOO_LARGE: "no"}.get(fit.verdict, "perhaps")
        text = f"{verdict}: needs {fit.gib} GiB; up to a batch of {fit.largest_batch:,}"
        for option in fit.options[:1]:
            text += f"; this one with --{option.name}={option.value}"
        yield Answer("fits?", text)
    if not offers:
        fits = [(forecast.fit, forecast.tier) for forecast in forecasts if forecast.fit]
        if len(forecasts) > 1 and fits and all(fit.verdict == TOO_LARGE for fit, _ in fits):
            batch, tier = max((fit.largest_batch, tier) for fit, tier in fits)
            largest = f"the largest global batch that fits is {batch:,}, on {tier}"
            yield Answer("fits?", f"no tier: {largest}")
            return
        may_fit = [item for item in forecasts if not item.fit or item.fit.verdict != TOO_LARGE]
        for forecast in may_fit[:MOST_REASONS]:
            yield from (Answer(forecast.tier, problem) for problem in forecast.problems[:1])
        return
    # The best within the limits of the user, and without them.
    cheapest = _best(offers, usd_of, hours_of)
    fastest = _best(offers, hours_of, usd_of)
    if within_hours is not None:
        shortest = span(min(offer.hours.low for _, offer in offers))
        none = f"none: the fastest takes at least {shortest}"
        within = _best_within(offers, attrgetter("hours_until_end"), within_hours, usd_of)
        yield Answer(f"within {span(within_hours)}", within or none)
    if budget_usd is not None:
        lowest = dollars(min(offer.usd.low for _, offer in offers))
        none = f"none: the cheapest costs at least {lowest} USD"
        within = _best_within(offers, usd_of, budget_usd, hours_of)
        yield Answer(f"for {dollars(budget_usd)} USD", within or none)
    yield Answer("cheapest", _line(cheapest))
    yield Answer("fastest", _line(fastest))
    if in_bfloat16:
        forecast, offer = _best(likely(in_bfloat16), usd_of, hours_of)
        cheaper = EQUAL * offer.usd.middle < cheapest[1].usd.middle
        if cheaper and forecast.tier != cheapest[0].tier:
            cost = f"{offer.usd.text(dollars, ' USD')} on {forecast.tier}, {time_of(offer)}"
            yield Answer("16 bits", f"{cost}, by --precision=mixed_bfloat16")
    untimed = Counter(item.problems[:1] for item in forecasts if not item.step)
    for problems, count in untimed.items():
        if problems and 2 * count >= len(forecasts):
            yield Answer("not timed", f"{count} tiers: {problems[0]}")
    # Whether GPUs are worth their price where a CPU is the cheapest; else whether more of them are,
    # for the cheapest kind of which there are several numbers.
    on_gpus = [choice for choice in offers if choice[0].kind in load_machines().accelerators]
    alike: dict[tuple[str, str], list[Choice]] = {}
    for forecast, offer in on_gpus:
        alike.setdefault((forecast.kind, offer.strategy), []).append((forecast, offer))
    pairs = [(min(same, key=_devices), max(same, key=_devices)) for same in alike.values()]
    several = [(few, many) for few, many in pairs if _devices(few) < _devices(many)]
    on_cpu = bool(on_gpus) and cheapest not in on_gpus
    if on_cpu:
        several = [(cheapest, _best(on_gpus, usd_of, hours_of))]
    for (few, few_priced), (many, many_priced) in several[:1]:
        faster = few_priced.hours.middle / many_priced.hours.middle
        dearer = many_priced.usd.middle / few_priced.usd.middle
        pays = "yes" if dearer <= DEARER else "only in a hurry"
        if faster < FASTER:
            pays = "no, a CPU is fast enough" if on_cpu else "no"
        gain = f"{figures(faster, 2)} x as fast as {few.tier} for {figures(dearer, 2)} x the money"
        question = "GPUs?" if on_cpu else f"{many.devices} GPUs?"
        yield Answer(question, f"{pays}: {many.tier} is {gain}")
    # Of what the time of the cheapest consists, and how sure it is.
    forecast, _ = cheapest
    if forecast.step and forecast.seconds:
        training = forecast.step.middle * forecast.steps
        installing = forecast.install_seconds.middle / 3600
        installed = f"{span(installing)} installing (own image: 0), " if installing else ""
        starting = span((forecast.seconds.middle - training) / 3600)
        each_step = f"{figures(1e3 * forecast.step.middle, 2)} ms a step"
        trained = f"{span(training / 3600)} training at {each_step}"
        yield Answer("the time", f"{installed}{starting} starting, {trained}")
        source = "as on an H100" if forecast.kind.startswith(CONSTANTS.card) else "from data sheets"
        source = "by steps on this CPU" if forecast.basis == BY_CPU else source
        predicted = f"{source}; surer: --measure={forecast.tier}"
        basis = f"measured on {forecast.measured}" if forecast.measured else predicted
        factor = forecast.step.times(1 / forecast.step.middle)
        ends = f"{figures(factor.low, 2)} to {figures(factor.high, 2)}"
        yield Answer("how sure?", f"a step may take {ends} x as long, {basis}")
    if here_hours:
        yield Answer("here", f"on this CPU: {span(here_hours)}, 0 USD")


def _best(offers: Sequence[Choice], measure: Measure, tie_breaker: Measure) -> Choice:
    """Returns the choice with the lowest `measure`; within EQUAL of it `tie_breaker` decides."""
    lowest = min(measure(offer).middle for _, offer in offers)
    equal = [choice for choice in offers if measure(choice[1]).middle <= EQUAL * lowest]
    return min(equal, key=lambda choice: tie_breaker(choice[1]).middle)


def _best_within(offers: Sequence[Choice], limited: Measure, limit: float, measure: Measure) -> str:
    """Returns the line of the choice with the lowest `measure` whose `limited` is within `limit`.

    If no choice is surely within the limit, it is one that perhaps is, by its middle, or else the
    closest of those whose low end is within; "" if there is none.
    """
    for end, doubt in (("high", ""), ("middle", "perhaps ")):
        if within := [choice for choice in offers if getattr(limited(choice[1]), end) <= limit]:
            return doubt + _line(_best(within, measure, limited))
    within = [choice for choice in offers if limited(choice[1]).low <= limit]
    return f"unlikely {_line(_best(within, limited, measure))}" if within else ""


def _devices(choice: Choice) -> int:
    return choice[0].devices


def _fits(choice: Choice) -> bool:
    fit = choice[0].fit
    return fit is None or fit.verdict == FITS


def _line(choice: Choice) -> str:
    forecast, offer = choice
    name = f"{forecast.tier} {STRATEGIES[offer.strategy]}{'' if _fits(choice) else ' if it fits'}"
    return f"{name:<20}  {offer.usd.text(dollars, ' USD'):<28}  {time_of(offer)}"


def time_of(offer: PricedEstimate) -> str:
    """Formats the time of a job as `7 min (4 - 12)`."""
    unit, hours = unit_of_time(offer.hours.middle)
    return offer.hours.times(1 / hours).text(brief, f" {unit}")
