"""Writes the verdict of a comparison: the fastest tier, the cheapest, the best buy, and what makes them unreliable."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from deploy.report.collection import Collection
from deploy.report.formatting import counted_devices, figures, money, percent
from deploy.report.measures import UNKNOWN, TierSummary, best, in_units
from trainer.base.run_files.goodput import (
    CLASSES,
    COMPILATION,
    INPUT,
    MUCH,
    REPEATED,
    RESTART,
    SAVE,
    START,
    shares_in_words,
)
from trainer.base.run_files.job_files import mapping, number
from trainer.base.settings.train_config import MAY_CHANGE

_RESOLUTION = 0.01  # speeds that differ by less than this share are equal, even if no spread is known
_LOSS_TOLERANCE = 0.05  # final losses that differ by less than this share of the larger one agree
_ROUNDING = 1e-6  # a relative difference that float32's rounding makes
_MORE_WORK = "use a larger batch per replica or a larger model."


def verdict(collection: Collection, rows: Sequence[TierSummary], baseline: str = "") -> list[str]:
    """Returns the sentences of the verdict, the most important first.

    Speeds are compared only between tiers of real devices; with fewer than two of these, the sentences on final losses
    come first. `baseline`: the tier that the fastest one is compared with, by default the first.
    """
    real = [row for row in rows if row.has_speed and not row.simulated]
    simulated = [row.tier for row in rows if row.simulated]
    done = [row for row in rows if row.done]
    sentences = [*_ranking(real, baseline or rows[0].tier)] if len(real) > 1 else []
    # Final losses compare only after the same number of steps with the same global batch.
    if collection.scaling != "weak" and len({row.steps for row in done}) == 1:
        sentences += _final_losses([row for row in done if row.final_loss is not None])
    if simulated:
        sentences.append(f"Simulated devices: {', '.join(simulated)}: their speeds do not apply to real machines, so "
                         "they are not ranked and have no efficiency and no cost.")  # fmt: skip
    elif len(real) < 2:
        sentences.append("Not ranked: fewer than two tiers of real devices have a speed.")
    sentences += _scaling(real)
    sentences += [
        f"{row.tier}: waiting for input {percent(row.input_wait)}: prepare the data "
        "(python -m trainer.data.prepare), or make your own data function faster."
        for row in real if (row.input_wait or 0.0) >= MUCH
    ]  # fmt: skip
    sentences += _goodput(rows)
    # Differences in the work of the tiers that should not be there.
    images = {row.tier: row.images for row in done if row.images is not None}
    if len(set(images.values())) > 1:
        counts = ", ".join(f"{tier} {count:,}" for tier, count in images.items())
        sentences.append(f"Different work: images read: {counts}. Compare images/s, not totals.")
    may_differ = MAY_CHANGE | ({"global_batch_size"} if collection.scaling == "weak" else set())
    first = {row.tier: row.group.runs[0].config for row in rows if row.group.runs and row.group.runs[0].config}
    for name in sorted({name for config in first.values() for name in config} - may_differ):
        values = {tier: repr(config.get(name)) for tier, config in first.items()}
        if len({*values.values()}) > 1:
            each = ", ".join(f"{value} ({tier})" for tier, value in values.items())
            sentences.append(f"Different work: {name} is {each}.")
    # Runs that did not end well.
    for row in rows:
        bad = [run for run in row.group.runs if run.state != "done"]
        count = f"{len(bad)} of {len(row.group.runs)} repeats: " if row.done else ""
        if ending := bad[0].ending if bad else row.not_done:
            sentences.append(f"{row.tier}: {count}{ending}.")
    if collection.local and collection.parallel > 1:
        sentences.append(f"Up to {collection.parallel} runs shared this machine and slowed each other down: use "
                         "--parallel=1.")  # fmt: skip
    return [in_units(sentence, rows) for sentence in sentences]


def _equally_fast(first: TierSummary, second: TierSummary) -> bool:
    """Returns whether the median speeds differ by no more than the larger interquartile range or, if larger, 1 %."""
    speeds = first.images_per_second, second.images_per_second
    widths = (speed.high - speed.low for speed in speeds)
    return bool(abs(_speed(first) - _speed(second)) <= max(*widths, _RESOLUTION * max(_speed(first), _speed(second))))


def _speed(row: TierSummary) -> float:
    return float(row.images_per_second.median)


def _ranking(rows: Sequence[TierSummary], baseline: str) -> Iterator[str]:
    """Yields a sentence that names the fastest tier, the cheapest and the best buy, and then one on each of them."""
    fastest = best(rows, "images_per_second")
    compared = fastest.speed_up and baseline in (row.tier for row in rows) and fastest.tier != baseline
    against = f", {fastest.speed_up:.2f} x {baseline}" if compared else ""
    ties = [row.tier for row in rows if row is not fastest and _equally_fast(row, fastest)]
    tied = f"; {', '.join(ties)} {'is' if len(ties) == 1 else 'are'} equal within the spread" if ties else ""
    speed = f"Fastest: {fastest.tier}, {figures(_speed(fastest))} images/s{against}{tied}."
    # Only tiers with a cost can be the cheapest or the best buy; the notes say why others have none.
    priced = [row for row in rows if row.cost_per_million_images is not None]
    if len(priced) < 2:
        yield speed
        yield "Cheapest and best buy are not known without prices: add --price_per_hour=TIER=USD."
        return
    among = f" of {', '.join(row.tier for row in priced)}" if len(priced) < len(rows) else ""
    if all(row.paid_seconds and row.cost for row in priced):
        cheapest = best(priced, "cost")
        spent = f"{money(cheapest.cost)} paid for {figures(cheapest.paid_seconds)} s"
        buy, product = min(priced, key=lambda row: row.cost * row.paid_seconds), "time and money, both as paid"
    else:
        cheapest = best(priced, "cost_per_million_images")
        spent = f"{money(cheapest.cost_per_million_images)} per million images"
        buy, product = min(priced, key=lambda row: row.cost_per_million_images / _speed(row)), "time and cost"
    titles: dict[str, list[str]] = {}
    for row, title in ((fastest, "the fastest"), (cheapest, "the cheapest"), (buy, "the best buy")):
        titles.setdefault(row.tier, []).append(title)
    named = {tier: ", ".join([*words[:-2], " and ".join(words[-2:])]) for tier, words in titles.items()}
    yield f"{'; '.join(f'{tier} is {words}' for tier, words in named.items())}."
    yield speed
    yield f"Cheapest{among}: {cheapest.tier}, {spent}."
    yield f"Best buy{among}: {buy.tier}, the lowest product of {product}."


def _scaling(rows: Sequence[TierSummary]) -> Iterator[str]:
    """Yields sentences on how the speed grows with the devices of a kind, and on tiers that more devices do not help.

    The tiers of a kind are compared with the one that has the fewest devices.
    """
    by_kind: dict[str, list[TierSummary]] = {}
    for row in sorted(rows, key=lambda row: (row.devices, -_speed(row))):
        if row.kind != UNKNOWN:
            by_kind.setdefault(row.kind, []).append(row)
    for alike in by_kind.values():
        first = alike[0]
        gains: list[str] = []
        reasons: list[str] = []
        for row in alike:
            fewer = [smaller for smaller in alike if smaller.devices < row.devices]
            if not fewer:
                continue
            smaller = best(fewer, "images_per_second")
            ratio = _speed(row) / _speed(smaller)
            if _equally_fast(row, smaller):
                equal = f"{_devices(row)} and {_devices(smaller)} are equally fast, within the spread"
                reasons.append(f"{equal}; {_MORE_WORK}")
            elif ratio < 1:
                slower = f"{row.devices} devices are slower than {smaller.devices}"
                reasons.append(f"{slower}: {row.tier} reaches {ratio:.2f} x {smaller.tier}; {_MORE_WORK}")
            else:
                usd, least = row.cost_per_million_images, first.cost_per_million_images
                dearer = f" for {usd / least:.2f} x the cost per million images" if usd and least else ""
                gains.append(f"{_devices(row)} {_speed(row) / _speed(first):.2f} x as fast{dearer}")
        if gains:
            yield f"Against {_devices(first)}: {', '.join(gains)}."
        yield from reasons


def _devices(row: TierSummary) -> str:
    return f"{row.tier} ({counted_devices(row.devices)})"


def _goodput(rows: Sequence[TierSummary]) -> Iterator[str]:
    """Yields a sentence for each tier on Vertex AI on what its seconds went to, and one on a slow worker.

    The seconds include those that were billed without being seen by a run, if they are known.
    """
    for row in rows:
        runs = [run for run in row.runs if run.goodput]
        seconds = Counter[str]()
        for run in runs:
            seconds.update(run.goodput)
        total = sum(seconds.values())
        reducible = (INPUT, SAVE, REPEATED, RESTART, COMPILATION, START)
        most = max(reducible, key=lambda name: seconds[name])
        lost = f", and lost {percent(seconds[most] / total)} to {CLASSES[most]}" if seconds[most] > MUCH * total else ""
        paid = "paid" if row.paid_seconds else "took"
        unpaid = sum(number(run.result.get("between_jobs_seconds")) or 0.0 for run in runs)
        apart = f"; {_hours(unpaid)} between its jobs are not paid" if unpaid >= 1 else ""
        if total and row.on_vertex:  # there the time is paid for
            yield f"{row.tier} {paid} {_hours(total)}{lost}: {shares_in_words(seconds)}{apart}."
        for slow in [worker for run in runs if (worker := mapping(run.result, "slow_worker"))][:1]:
            yield f"{row.tier}: {slow.get('name')} is slow: {slow.get('why')}."


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{figures(seconds)} s"


def _final_losses(rows: Sequence[TierSummary]) -> Iterator[str]:
    """Yields a sentence on how closely the final losses agree, or one for each that differs from the first tier's.

    Losses differ if they are apart by more than 5 %, and by more than the loss changes between reports.
    """
    if len(rows) < 2:
        return
    first = rows[0]
    differing = []
    most = 0.0  # the largest relative difference
    for row in rows[1:]:
        apart, larger = abs(row.final_loss - first.final_loss), max(abs(row.final_loss), abs(first.final_loss))
        most = max(most, apart / (larger or 1.0))
        if row.loss_name != first.loss_name:
            names = f"{row.loss_name} of {row.tier}, {first.loss_name} of {first.tier}"
            differing.append(f"Final losses cannot be compared: {names}.")
        elif apart > max(_LOSS_TOLERANCE * larger, _noise(row), _noise(first)):
            differing.append(
                f"Different final losses: {row.loss_name} {figures(row.final_loss)} on {row.tier}, "
                f"{figures(first.final_loss)} on {first.tier}: "
                "rounding alone can do that in a short run, and then not with --precision=float64; if the training "
                "differs, which `python -m trainer.check` tells, the speeds are not comparable."
            )
    yield from differing
    if not differing:
        losses = sorted(row.final_loss for row in rows)
        values = f"{first.loss_name} {' to '.join(dict.fromkeys(map(figures, (losses[0], losses[-1]))))}"
        noise = ", which is less than the loss changes between reports" if most > _LOSS_TOLERANCE else ""
        equal = "are equal up to rounding" if most else "are equal"
        agree = f"agree within {figures(100 * most, 2)} %{noise}" if most > _ROUNDING else equal
        yield f"The final losses {agree}: {values}."


def _noise(row: TierSummary) -> float:
    """Returns by how much the loss changes between reports: the median over the last ten, the largest of all runs."""
    last = [[line.scalars.get(row.loss_name) for line in (run.reports or run.epochs)[-10:]] for run in row.group.runs]
    curves = [[value for value in values if value is not None] for values in last]
    changes = [[abs(after - before) for before, after in pairwise(values)] for values in curves]
    return max((statistics.median(of_run) for of_run in changes if of_run), default=0.0)
