"""Writes the verdict: which tier to buy for this work, when another, and what makes the numbers
unreliable."""

import statistics
from collections.abc import Iterator
from itertools import pairwise

from deploy.report.collection import Collection
from deploy.report.formatting import figures, grouped, money, percent, span
from deploy.report.measures import Rows, TierSummary, in_units, loss_curve
from trainer.base.run_files.goodput import MUCH
from trainer.base.run_files.job_files import mapping

# speeds that differ by less than this share are equal, even if no spread is known
_RESOLUTION = 0.01
_LOSS_TOLERANCE = 0.05  # final losses that differ by less than this share of the larger one agree
_ROUNDING = 1e-6  # a relative difference that float32's rounding makes: such losses count as equal


def verdict(collection: Collection, rows: Rows) -> list[str]:
    """Returns the sentences of the verdict, the most important first.

    Only tiers of real devices that did the same work are ranked; if there are fewer than two of
    these, the sentences on final losses come first.
    """
    real = [row for row in rows if row.has_speed]
    done = [row for row in rows if row.done]
    simulated = [row.tier for row in rows if row.simulated]
    sentences = [*_different_work(done)]
    if not sentences:
        weak = collection.scaling == "weak"
        sentences += _advice(real, weak=weak) if len(real) > 1 else []
        if not weak:
            sentences += _final_losses([row for row in done if row.final_loss is not None])
    if simulated:
        names = ", ".join(simulated)
        sentences.append(
            f"Simulated devices: {names}: their speeds do not apply to real machines, so they are"
            " not shown."
        )
    elif len(real) < 2:
        sentences.append("Not ranked: fewer than two tiers of real devices have a speed.")
    if len(real) > 1 and all(row.repeats == 1 for row in real):
        sentences.append(
            "Each tier ran once, which does not show how much its runs differ: --repeats=3 does."
        )
    for row in rows:
        sentences += _remarks(row)
    if any(group.local for group in collection.tiers) and collection.parallel > 1:
        shared = f"Up to {collection.parallel} runs shared this machine and slowed each other down"
        sentences.append(f"{shared}: use --parallel=1.")
    return [in_units(sentence, rows) for sentence in sentences]


def _different_work(rows: Rows) -> Iterator[str]:
    """Yields a sentence on all that differs in the work of tiers that are done."""
    # without those whose run.json is lost
    recorded = [row for row in rows if len(row.work) > 1] or rows
    differing = []
    for name in dict.fromkeys(name for row in recorded for name in row.work):
        tiers_by_value = grouped((str(row.work.get(name)), row.tier) for row in recorded)
        if len(tiers_by_value) > 1:
            values = [f"{value} ({tiers})" for value, tiers in tiers_by_value.items()]
            differing.append(f"{name} is {', '.join(values)}")
    if differing:
        yield f"Not ranked, because the runs did different work: {'; '.join(differing)}."


def _advice(rows: Rows, *, weak: bool) -> Iterator[str]:
    """Yields which tier to buy and when another, and what a spot price means.

    The best buy has the lowest product of time and money. Of tiers that are equally fast the
    cheapest is advised.
    """
    # Without two prices only the fastest is known.
    fastest = max(rows, key=_speed)
    ties = [row for row in rows if row is not fastest and _equally_fast(row, fastest)]
    priced = [row for row in rows if row.cost_per_million_images is not None]
    if len(priced) < 2:
        tied = f"; equal within the spread: {', '.join(row.tier for row in ties)}" if ties else ""
        speed = f"{figures(_speed(fastest))} images/s"
        if fastest.speed_up and fastest is not fastest.base:
            speed = f"{speed}, {fastest.speed_up:.2f} x {fastest.base.tier}"
        yield f"Fastest: {fastest.tier}, {speed}{tied}."
        yield "Which one to buy is not known without prices: add --price_per_hour=TIER=USD."
        return
    # The money and the time of each, of a run or of a million images.
    # Under weak scaling runs differ in length.
    whole = not weak and all(row.total_seconds and row.cost for row in priced)
    usd = {row.tier: (row.cost if whole else row.cost_per_million_images) or 0.0 for row in priced}
    hours = {}
    for row in priced:
        hours[row.tier] = ((whole and row.total_seconds) or 1e6 / _speed(row)) / 3600

    def terms(row: TierSummary, merits: str = "") -> str:
        if row not in priced:
            return f"{row.tier}, whose price is not known"
        spot = " (spot)" if row.group.spot and "spot" not in row.tier else ""
        unit = "a run" if whole else "per million images"
        return (
            f"{row.tier}{spot}{merits}: {money(usd[row.tier])} and {span(hours[row.tier])} {unit}"
        )

    def against(row: TierSummary, other: TierSummary, name: str = "") -> str:
        faster = hours[other.tier] / hours[row.tier]
        dearer = usd[row.tier] / usd[other.tier]
        return f", {faster:.1f} x as fast{name} for {dearer:.1f} x the money"

    def product(row: TierSummary) -> float:
        return usd[row.tier] * hours[row.tier]

    # The advice: the best buy, then when another is better.
    best = min(priced, key=product)
    best = min((row for row in priced if _equally_fast(row, best)), key=lambda row: usd[row.tier])
    cheapest = min(priced, key=lambda row: usd[row.tier])
    all_equal = len(ties) == len(rows) - 1
    is_fastest = _equally_fast(best, fastest)
    is_cheapest = usd[best.tier] == usd[cheapest.tier]
    as_good = [
        row.tier
        for row in priced
        if row is not best
        and _equally_fast(row, best)
        and row.group.spot == best.group.spot
        and usd[row.tier] - usd[best.tier] <= _tolerance(row, best) * usd[row.tier]
    ]
    others = [row for row in rows if row is not best]
    if as_good:
        equal = " or ".join(as_good)
        advice = f"Buy {terms(best, f' or {equal}, equal in time and money within the spread')}"
    else:
        words = ["the cheapest"] if is_cheapest else []
        words += ["the fastest"] if is_fastest and not all_equal else []
        advice = f"Buy {terms(best, ', ' * bool(words) + ' and '.join(words))}"
        if all_equal:
            names = "the others are" if len(others) > 1 else f"{others[0].tier} is"
            advice += f"; {names} not measurably faster"
        elif len(words) == 2:
            second = min((row for row in others if row in priced), key=product)
            advice += f"; the next best is {terms(second)}"
    if not is_cheapest:
        advice += against(best, cheapest, " as the cheapest")
        advice += f"; if money counts more, {terms(cheapest)}"
    # a run with a longer start-up may take longer at more images a second
    if not is_fastest and (fastest not in priced or hours[fastest.tier] < hours[best.tier]):
        advice += f"; if time counts more, {terms(fastest)}"
        advice += against(fastest, best) if fastest in priced else ""
    kept = [row for row in priced if not row.group.spot]
    if best.group.spot and kept:
        advice += f"; if it must not be interrupted, {terms(min(kept, key=product))}"
    yield f"{advice}."
    if len(priced) < len(rows):
        yield f"The advice is among {', '.join(usd)}, whose prices are known."
    if any(row.group.spot for row in rows):
        yield (
            "Google may take spot machines away at any time: the run then resumes from its last"
            " checkpoint, ends later and costs more."
        )


def _equally_fast(first: TierSummary, second: TierSummary) -> bool:
    """Returns whether the median speeds are equal within their spread."""
    difference = abs(_speed(first) - _speed(second))
    return difference <= _tolerance(first, second) * max(_speed(first), _speed(second))


def _tolerance(first: TierSummary, second: TierSummary) -> float:
    """Returns the share by which equal speeds may differ: the larger interquartile range of the two
    over the larger median, at least 1 %."""
    speeds = first.images_per_second, second.images_per_second
    width = max(speed.high - speed.low for speed in speeds)
    return max(width / max(_speed(first), _speed(second)), _RESOLUTION)


def _speed(row: TierSummary) -> float:
    return float(row.images_per_second.median)


def _remarks(row: TierSummary) -> Iterator[str]:
    """Yields what there is to know of a tier: runs that did not end well, waited for input, or are
    not comparable."""
    bad = [run for run in row.group.runs if run.state != "done"]
    if bad or not row.done:
        count = f"{len(bad)} of {len(row.group.runs)} repeats: " if row.done else ""
        paid = f"; {money(row.paid)} was paid for all attempts" if row.paid else ""
        yield f"{row.tier}: {count}{bad[0].ending if bad else row.not_done}{paid}."
    if row.has_speed and (row.input_wait or 0.0) >= MUCH:
        # Only images that are decoded from files can be prepared; tables and arrays are in memory
        # already.
        decoded = any("converted" in mapping(run.info, "data") for run in row.runs)
        remedy = ": prepare the data (python -m trainer.data.prepare)" if decoded else ""
        yield f"{row.tier}: waiting for input {percent(row.input_wait)}{remedy}."
    for run in row.group.runs:
        if run.result.get("depends_on_replicas"):
            yield (
                f"{row.tier}: its numbers are those of {row.devices} replicas alone"
                " (--allow_replica_dependence)."
            )
        if why := run.result.get("not_compared"):
            yield f"{row.tier}: its steps were not compared with those of one replica: {why}."
        if slow := mapping(run.result, "slow_worker"):
            yield f"{row.tier}: {slow.get('name')} is slow: {slow.get('why')}."


def _final_losses(rows: Rows) -> Iterator[str]:
    """Yields a sentence on how closely the final losses agree, or one for each that differs from
    the first tier's.

    Losses differ if they are apart by more than 5 %, and by more than the loss changes between
    reports.
    """
    if len(rows) < 2:
        return
    first = rows[0]
    differing = []
    largest = 0.0  # the largest relative difference
    # Each tier against the first.
    for row in rows[1:]:
        apart = abs(row.final_loss - first.final_loss)
        larger = max(abs(row.final_loss), abs(first.final_loss))
        largest = max(largest, apart / (larger or 1.0))
        if row.loss_name != first.loss_name:
            names = f"{row.loss_name} of {row.tier}, {first.loss_name} of {first.tier}"
            differing.append(f"Final losses cannot be compared: {names}.")
        elif apart > max(_LOSS_TOLERANCE * larger, _noise(row), _noise(first)):
            differing.append(
                f"Different final losses: {row.loss_name} {figures(row.final_loss)} on {row.tier},"
                f" {figures(first.final_loss)} on {first.tier}: rounding alone can do that in a"
                " short run, and then not with --precision=float64; if the training differs, which"
                " `python -m trainer.check` tells, the speeds are not comparable."
            )
    # All agree: within which share, and whether that is more than rounding.
    yield from differing
    if not differing:
        losses = sorted(row.final_loss for row in rows)
        ends = " to ".join(dict.fromkeys(map(figures, (losses[0], losses[-1]))))
        agreement = "are equal up to rounding"
        if largest > _ROUNDING:
            agreement = f"agree within {figures(100 * largest, 2)} %"
        if largest > _LOSS_TOLERANCE:
            agreement += ", which is less than the loss changes between reports"
        yield f"The final losses {agreement}: {first.loss_name} {ends}."


def _noise(row: TierSummary) -> float:
    """Returns by how much the loss changes between reports: the median over the last ten, the
    largest of all runs."""
    curves = [loss_curve(run, row.loss_name or "")[1][-10:] for run in row.group.runs]
    changes = [[abs(new - old) for old, new in pairwise(values)] for values in curves]
    return max((statistics.median(of_run) for of_run in changes if of_run), default=0.0)
