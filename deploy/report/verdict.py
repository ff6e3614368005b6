"""Writes the verdict of a comparison: the fastest, cheapest and best tier, and what makes the results unreliable."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from deploy.report.collection import Collection
from deploy.report.measures import best
from deploy.report.repeats import Spread
from deploy.report.table import counted_devices, figures, money, percent
from deploy.report.tier_summary import UNKNOWN, TierSummary, in_units
from trainer.base.run_files.breakdown import INPUT, MUCH, WORDS, advice, tried_by
from trainer.base.run_files.goodput import CLASSES, COMPILATION, REPEATED, RESTART, SAVE, shares_in_words
from trainer.base.run_files.goodput import INPUT as INPUT_WAIT
from trainer.base.run_files.records import mapping, number
from trainer.base.settings.train_config import MAY_CHANGE

_RESOLUTION = 0.01  # speeds that differ by less are equal, also without a known spread
_LOSS_TOLERANCE = 0.05  # of the larger loss
_MUCH_STARTUP = 0.2  # of the total time
_MORE_WORK = "use a larger batch per replica or a larger model."


def verdict(collection: Collection, rows: Sequence[TierSummary], baseline: str = "") -> list[str]:
    """Returns sentences, the most important first. `baseline`: the tier of the speed-ups, by default the first.

    Only speeds of real devices are compared.
    """
    done = [row for row in rows if row.has_speed]
    real = [row for row in done if not row.simulated]
    sentences = [
        *_simulated(collection, rows),
        *(_ranking(real, baseline or rows[0].tier) if real or not done else ()),
        *_scaling(real),
        *_causes(real),
        *_goodput(rows),
        *_different_work(collection, rows),
        *(() if collection.scaling == "weak" else _losses(done)),  # another global batch has other losses
        *_ends(rows),
        *_startup(done),
        *_estimates(collection, rows),
    ]
    return [in_units(sentence, rows) for sentence in sentences]


def equal(first: Spread, second: Spread) -> bool:
    """Returns whether two medians differ by no more than the larger interquartile range, or than 1 %."""
    tolerance = max(first.width, second.width, _RESOLUTION * max(first.median, second.median))
    return abs(first.median - second.median) <= tolerance


def _equally_fast(row: TierSummary, other: TierSummary) -> bool:
    return equal(row.images_per_second, other.images_per_second)


def _speed(row: TierSummary) -> float:
    return row.images_per_second.median


def _ranking(done: Sequence[TierSummary], baseline: str) -> Iterator[str]:
    if len(done) < 2:
        yield "No verdict: fewer than two tiers have a speed to compare."
        return
    fastest = best(done, "images_per_second")
    compared = fastest.speed_up and baseline in (row.tier for row in done) and fastest.tier != baseline
    against = f", {fastest.speed_up:.2f} x {baseline}" if compared else ""
    ties = [row.tier for row in done if row is not fastest and _equally_fast(row, fastest)]
    tied = f"; {_and(ties)} {'is' if len(ties) == 1 else 'are'} equal within the spread" if ties else ""
    yield f"Fastest: {fastest.tier}, {figures(_speed(fastest))} images/s{against}{tied}."
    yield from _costs(done)


def _costs(done: Sequence[TierSummary]) -> Iterator[str]:
    """Yields the cheapest and the best tier of those with a cost; the notes say why others have none."""
    priced = [row for row in done if row.cost_per_million_images is not None]
    if len(priced) < 2:
        yield "Cheapest and best buy are not known: fewer than two of these tiers have a cost."
        return
    among = f" of {_and([row.tier for row in priced])}" if len(priced) < len(done) else ""
    if all(row.paid_seconds and row.cost for row in priced):
        cheapest = best(priced, "cost")
        buy = min(priced, key=lambda row: row.cost * row.paid_seconds)
        yield f"Cheapest{among}: {cheapest.tier}, {money(cheapest.cost)} paid for {figures(cheapest.paid_seconds)} s."
        yield f"Best buy{among}: {buy.tier}, the lowest product of time and money, both as paid."
        return
    cheapest = best(priced, "cost_per_million_images")
    yield f"Cheapest{among}: {cheapest.tier}, {money(cheapest.cost_per_million_images)} per million images."
    buy = min(priced, key=lambda row: row.cost_per_million_images / _speed(row))
    yield f"Best buy{among}: {buy.tier}, the lowest product of time and cost."


def _scaling(done: Sequence[TierSummary]) -> Iterator[str]:
    """Compares the tiers of each kind with the one of fewest devices, and names those that more devices do not help."""
    by_kind: dict[str, list[TierSummary]] = {}
    for row in sorted(done, key=lambda row: (row.devices, -_speed(row))):
        if row.kind != UNKNOWN:
            by_kind.setdefault(row.kind, []).append(row)
    for alike in by_kind.values():
        first, more = alike[0], [row for row in alike if row.devices > alike[0].devices]
        reasons = [_no_gain(row, [other for other in alike if other.devices < row.devices]) for row in more]
        gains = [
            f"{_devices(row)} {_gain(row, first)}" for row, reason in zip(more, reasons, strict=True) if not reason
        ]
        if gains:
            yield f"Against {_devices(first)}: {', '.join(gains)}."
        yield from filter(None, reasons)


def _devices(row: TierSummary) -> str:
    return f"{row.tier} ({counted_devices(row.devices)})"


def _gain(row: TierSummary, first: TierSummary) -> str:
    faster = f"{_speed(row) / _speed(first):.2f} x as fast"
    if not (row.cost_per_million_images and first.cost_per_million_images):
        return faster
    dearer = row.cost_per_million_images / first.cost_per_million_images
    return f"{faster} for {dearer:.2f} x the cost per million images"


def _no_gain(row: TierSummary, fewer: Sequence[TierSummary]) -> str:
    """Returns that a tier is not faster than the fastest one with fewer devices; "" if it is."""
    other = best(fewer, "images_per_second")
    if _equally_fast(row, other):
        return f"{_devices(row)} and {_devices(other)} are equally fast, within the spread; {_MORE_WORK}"
    ratio, slower = _speed(row) / _speed(other), f"{row.devices} devices are slower than {other.devices}"
    return f"{slower}: {row.tier} reaches {ratio:.2f} x {other.tier}; {_MORE_WORK}" if ratio < 1 else ""


def _causes(done: Sequence[TierSummary]) -> Iterator[str]:
    """Says what the time of a step goes to, by its profile or its waiting for input, and what to do about it."""
    for row in done:
        runs = row.group.runs
        tried = [remedy for run in runs for remedy in tried_by(run.config, mapping(run.info, "compilation"))]
        shares = {kind: row.values[f"profile_{kind}"] for kind in WORDS}
        if row.profile_matrix is None:
            shares = {INPUT: row.input_wait} if (row.input_wait or 0.0) >= MUCH else {}
        yield from (f"{row.tier}: {line}." for line in advice(shares, tried))


_LOSSES = (INPUT_WAIT, SAVE, REPEATED, RESTART, COMPILATION)  # of time; the start has a sentence of its own


def _goodput(rows: Sequence[TierSummary]) -> Iterator[str]:
    """Says what the seconds of a tier's runs went to, those that were paid for if that is known, and who is slow."""
    for row in rows:
        runs = [run for run in row.runs if run.goodput]
        seconds = Counter[str]()
        for run in runs:
            seconds.update(run.goodput)
        total = sum(seconds.values())
        most = max(_LOSSES, key=lambda name: seconds[name])
        lost = f", and lost {percent(seconds[most] / total)} to {CLASSES[most]}" if seconds[most] > MUCH * total else ""
        paid = "paid" if row.paid_seconds else "took"
        unpaid = sum(number(run.result.get("between_jobs_seconds")) or 0.0 for run in runs)
        apart = f"; {_hours(unpaid)} between its jobs are not paid" if unpaid >= 1 else ""
        if total:
            yield f"{row.tier} {paid} {_hours(total)}{lost}: {shares_in_words(seconds)}{apart}."
        slow = next((found for run in runs if (found := mapping(run.result, "slow_worker"))), None)
        if slow:
            yield f"{row.tier}: {slow.get('name')} is slow: {slow.get('why')}."


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{figures(seconds)} s"


def _different_work(collection: Collection, rows: Sequence[TierSummary]) -> Iterator[str]:
    images = {row.tier: row.images for row in rows if row.images is not None and row.done}
    if len(set(images.values())) > 1:
        counts = ", ".join(f"{tier} {count:,}" for tier, count in images.items())
        yield f"Different work: images read: {counts}. Compare images/s, not totals."
    may_differ = MAY_CHANGE | ({"global_batch_size"} if collection.scaling == "weak" else set())
    first = {row.tier: row.group.runs[0].config for row in rows if row.group.runs and row.group.runs[0].config}
    for name in sorted({name for config in first.values() for name in config} - may_differ):
        values = {tier: repr(config.get(name)) for tier, config in first.items()}
        if len({*values.values()}) > 1:
            yield f"Different work: {name} is {', '.join(f'{value} ({tier})' for tier, value in values.items())}."


def _losses(done: Sequence[TierSummary]) -> Iterator[str]:
    """Says how close the final losses are, or which differ from the first tier's.

    They differ if it is by more than 5 %, and by more than the loss changes between reports.
    """
    rows = [row for row in done if row.final_loss is not None]
    alike, most = len(rows) > 1, 0.0
    for first, row in product(rows[:1], rows[1:]):
        share = abs(row.final_loss - first.final_loss) / (max(abs(row.final_loss), abs(first.final_loss)) or 1.0)
        most = max(most, share)
        if row.loss_name != first.loss_name:
            alike = False
            yield f"Final losses cannot be compared: {row.loss_name} of {row.tier}, {first.loss_name} of {first.tier}."
        elif share > _LOSS_TOLERANCE and abs(row.final_loss - first.final_loss) > max(_noise(row), _noise(first)):
            alike = False
            yield (
                f"Different final losses: {row.loss_name} {figures(row.final_loss)} on {row.tier}, "
                f"{figures(first.final_loss)} on {first.tier}: "
                "rounding alone can do that in a short run; if the training differs, which `python -m trainer.check` "
                "tells, the speeds are not comparable."
            )
    if alike:
        losses = sorted(row.final_loss for row in rows)
        values = f"{rows[0].loss_name} {' to '.join(dict.fromkeys(map(figures, (losses[0], losses[-1]))))}"
        noise = ", which is less than the loss changes between reports" if most > _LOSS_TOLERANCE else ""
        agree = f"agree within {figures(100 * most, 2)} %{noise}" if most else "are equal"
        yield f"The final losses {agree}: {values}."


def _noise(row: TierSummary) -> float:
    """Returns the median change of the loss between its last ten reports, the largest of the runs."""
    last = [[line.scalars.get(row.loss_name) for line in (run.reports or run.epochs)[-10:]] for run in row.group.runs]
    known = [[value for value in values if value is not None] for values in last]
    changes = [[abs(after - before) for before, after in pairwise(values)] for values in known]
    return max((statistics.median(of_run) for of_run in changes if of_run), default=0.0)


def _ends(rows: Sequence[TierSummary]) -> Iterator[str]:
    for row in rows:
        runs = row.group.runs
        bad = [run for run in runs if run.state != "done"]
        of = f"{len(bad)} of {len(runs)} repeats: " if row.done else ""
        yield from (f"{row.tier}: {of}{run.ending}." for run in bad[:1])
        if not runs:
            yield f"{row.tier}: it was not run."


def _startup(done: Sequence[TierSummary]) -> Iterator[str]:
    shares = [(row.startup_seconds / row.total_seconds, row.tier)
              for row in done if row.startup_seconds and row.total_seconds]  # fmt: skip
    most, tier = max(shares, default=(0.0, ""))
    if most > _MUCH_STARTUP:
        on = f"on {tier}" if len(done) == 1 else f"at most, on {tier}"
        yield f"Start-up is a large part of the total ({percent(most)} {on}): it matters less in a longer run."


def _simulated(collection: Collection, rows: Sequence[TierSummary]) -> Iterator[str]:
    names = [row.tier for row in rows if row.simulated]
    if names:
        yield (
            f"Simulated devices: {_and(names)}: their speeds do not apply to real machines, so they are not ranked and "
            "have no efficiency and no cost."
        )
    if collection.local and collection.parallel > 1:
        yield f"Up to {collection.parallel} runs shared this machine and slowed each other down: use --parallel=1."


def _estimates(collection: Collection, rows: Sequence[TierSummary]) -> Iterator[str]:
    for row in rows:
        estimate = collection.estimates.get(row.tier)
        if not estimate or not row.total_seconds:
            continue
        seconds, different = estimate["seconds"], _different_job(estimate, row)
        if different:
            yield f"The estimate for {row.tier} is for another job ({different})."
            continue
        off = 100 * (seconds["middle"] / row.total_seconds - 1)
        inside = seconds["low"] <= row.total_seconds <= seconds["high"]
        yield (
            f"The estimate for {row.tier} was {figures(seconds['middle'])} s, the run took "
            f"{figures(row.total_seconds)} s: {abs(off):.0f} % too {'high' if off > 0 else 'low'}, "
            f"{'inside' if inside else 'outside'} its interval."
        )


# Settings that do not change the work, or that the number of steps replaces.
_NOT_WORK = {"cache_dir", "epochs", "expect_devices", "job_dir", "profile_steps", "recipe", "report_every_steps"}


def _different_job(estimate: Mapping[str, Any], row: TierSummary) -> str:
    """Returns in what the estimated job differs from the one that ran; "" if it does not."""
    config = next((run.config for run in row.group.runs if run.config), {})
    planned, ran = {**estimate["config"], "steps": estimate.get("steps")}, {**config, "steps": row.steps}
    names = ["steps", *sorted((planned.keys() & ran.keys()) - {"steps", *_NOT_WORK})]
    different = [name for name in names if planned[name] is None or planned[name] != ran[name]]
    return "; ".join(
        f"{name}: {'not known' if planned[name] is None else repr(planned[name])} in the estimate, "
        f"{'not known' if ran[name] is None else repr(ran[name])} in the run"
        for name in different[:3]
    )


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
