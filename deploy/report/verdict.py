"""Writes the verdict of a comparison: the fastest, cheapest and best tier, and what makes the results unreliable."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from deploy.report.collection import Collection
from deploy.report.measures import best
from deploy.report.repeats import Spread, largest
from deploy.report.table import counted_devices, figures, money, percent
from deploy.report.tier_summary import UNKNOWN, UNKNOWN_MACHINE, TierSummary, in_units
from trainer.base.run_files.breakdown import INPUT, MUCH, WORDS, advice, tried_by
from trainer.base.run_files.records import items, mapping, number
from trainer.base.settings.train_config import MAY_CHANGE

_RESOLUTION = 0.01  # speeds that differ by less are equal, also without a known spread
_LOSS_TOLERANCE = 0.05  # of the larger loss
_MUCH_STARTUP = 0.2  # of the total time
_MANY = 4  # tiers that are named one by one
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
        *_communication(real),
        *_causes(real),
        *_different_work(collection, rows),
        *([] if collection.scaling == "weak" else _losses(done)),  # another global batch has other losses
        *_ends(rows),
        *_startup(done),
        *_estimates(collection, rows),
        *_predictions(rows),
    ]
    return [in_units(sentence, rows) for sentence in sentences]


def equal(one: Spread, other: Spread) -> bool:
    """Returns whether two medians differ by no more than the larger interquartile range, or than 1 %."""
    tolerance = max(one.width, other.width, _RESOLUTION * max(one.median, other.median))
    return abs(one.median - other.median) <= tolerance


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
    """Yields the cheapest and the best tier of those with a cost, and why the others have none."""
    priced = [row for row in done if row.cost_per_million_images is not None]
    left_out: dict[str, list[str]] = {}
    for row in done:
        if row not in priced:
            left_out.setdefault(_no_cost(row), []).append(row.tier)
    note = f" ({'; '.join(f'{_and(tiers)}: {why}' for why, tiers in left_out.items())})" if left_out else ""
    if len(priced) < 2:
        yield f"Cheapest and best buy are not known{note}."
        return
    cheapest = best(priced, "cost_per_million_images")
    yield f"Cheapest: {cheapest.tier}, {money(cheapest.cost_per_million_images)} per million images{note}."
    buy = min(priced, key=lambda row: row.cost_per_million_images / _speed(row))
    yield f"Best buy: {buy.tier}, the lowest product of time and cost{note}."


def _no_cost(row: TierSummary) -> str:
    if row.price_per_hour is None:
        return "no price"
    return UNKNOWN_MACHINE if row.kind == UNKNOWN else "ran on this machine"


def _scaling(done: Sequence[TierSummary]) -> Iterator[str]:
    """Compares the tiers of each kind with the one of fewest devices, and names those that more devices do not help."""
    by_kind: dict[str, list[TierSummary]] = {}
    for row in sorted(done, key=lambda row: (row.devices, -_speed(row))):
        if row.kind != UNKNOWN:
            by_kind.setdefault(row.kind, []).append(row)
    for first, *others in by_kind.values():
        faster, exceptions = [], []
        for row in others:
            fewer = [other for other in (first, *others) if other.devices < row.devices]
            exception = _no_gain(row, best(fewer, "images_per_second")) if fewer else ""
            if exception:
                exceptions.append(exception)
            elif fewer:
                faster.append(f"{_devices(row)} {_gain(row, first)}")
        if faster:
            yield f"Against {_devices(first)}: {', '.join(faster)}."
        yield from exceptions


def _devices(row: TierSummary) -> str:
    return f"{row.tier} ({counted_devices(row.devices)})"


def _gain(row: TierSummary, first: TierSummary) -> str:
    faster = f"{_speed(row) / _speed(first):.2f} x as fast"
    if not (row.cost_per_million_images and first.cost_per_million_images):
        return faster
    dearer = row.cost_per_million_images / first.cost_per_million_images
    return f"{faster} for {dearer:.2f} x the cost per million images"


def _no_gain(row: TierSummary, other: TierSummary) -> str:
    """Returns that a tier is not faster than another one with fewer devices; "" if it is."""
    if _equally_fast(row, other):
        return f"{_devices(row)} and {_devices(other)} are equally fast, within the spread; {_MORE_WORK}"
    ratio, slower = _speed(row) / _speed(other), f"{row.devices} devices are slower than {other.devices}"
    return f"{slower}: {row.tier} reaches {ratio:.2f} x {other.tier}; {_MORE_WORK}" if ratio < 1 else ""


def _communication(done: Sequence[TierSummary]) -> Iterator[str]:
    """Measures communication: the time of a step beyond that of one such device with the same batch per replica."""
    for row in done:
        single = next((other for other in done if _is_single(other, row)), None)
        if single is None or not single.step_seconds or not row.step_seconds:
            continue
        if equal(single.step_seconds, row.step_seconds) or row.step_seconds.median < single.step_seconds.median:
            yield f"{row.tier}: communication takes less of a step than the spread (compared with {single.tier})."
        else:
            share = 1 - single.step_seconds.median / row.step_seconds.median
            yield (
                f"{row.tier}: {100 * share:.0f} % of a step is communication and waiting, measured as the time beyond "
                f"a step of {single.tier}, which is one device with the same batch per replica."
            )


def _causes(done: Sequence[TierSummary]) -> Iterator[str]:
    """Says what the time of a step goes to, what to do about it, and how that shifts between the tiers."""
    for row in done:
        runs = row.group.runs
        tried = [remedy for run in runs for remedy in tried_by(run.config, mapping(run.info, "compilation"))]
        yield from (f"{row.tier}: {line}." for line in advice(_shares(row), tried))
    for kind in WORDS:
        shares = {row.tier: row.values[f"profile_{kind}"] for row in done if row.profile_matrix is not None}
        least, most = (choose(shares, key=lambda tier: shares[tier], default="") for choose in (min, max))
        if shares and shares[most] - shares[least] >= MUCH:
            words = f"{percent(shares[least])} of a step on {least}, {percent(shares[most])} on {most}"
            yield f"{WORDS[kind].capitalize()} is {words}."


def _shares(row: TierSummary) -> dict[str, float]:
    """Returns the shares of the tier's profile; without one, that of waiting for input if it is much."""
    if row.profile_matrix is not None:
        return {kind: row.values[f"profile_{kind}"] for kind in WORDS}
    return {INPUT: row.input_wait} if row.input_wait is not None and row.input_wait >= MUCH else {}


def _is_single(single: TierSummary, row: TierSummary) -> bool:
    named = bool(single.machine and row.machine)
    same = single.kind == row.kind and single.batch_per_replica == row.batch_per_replica is not None
    return named and same and single.devices == 1 < row.devices


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


def _losses(done: Sequence[TierSummary]) -> list[str]:
    """Says how close the final losses are, and names those that differ too much from the first tier's."""
    rows = [row for row in done if row.final_loss is not None]
    differences = [line for row in rows[1:] if (line := _different_loss(row, rows[0]))]
    return differences or ([_agreement(rows)] if len(rows) > 1 else [])


def _different_loss(row: TierSummary, first: TierSummary) -> str:
    """Returns that two losses differ by more than 5 %, and by more than the loss changes between reports; "" if not."""
    if row.loss_name != first.loss_name:
        return f"Final losses cannot be compared: {row.loss_name} of {row.tier}, {first.loss_name} of {first.tier}."
    noise = max(map(_noise, (row, first)))
    if abs(row.final_loss - first.final_loss) <= max(
        _LOSS_TOLERANCE * max(abs(row.final_loss), abs(first.final_loss)), noise
    ):
        return ""
    return (
        f"Different final losses: {row.loss_name} {figures(row.final_loss)} on {row.tier}, "
        f"{figures(first.final_loss)} on {first.tier}: "
        "rounding alone can do that in a short run; if the training differs, which `python -m trainer.check` tells, "
        "the speeds are not comparable."
    )


def _agreement(rows: Sequence[TierSummary]) -> str:
    """Returns within what the losses of tiers that do not differ too much agree."""
    losses = [row.final_loss for row in rows]
    shown = list(dict.fromkeys(map(figures, sorted(losses))))
    values = f"{rows[0].loss_name} {' to '.join([shown[0], shown[-1]][: len(shown)])}"
    share = max(abs(loss - losses[0]) / (max(abs(loss), abs(losses[0])) or 1.0) for loss in losses)
    if share == 0:
        return f"The final losses are equal: {values}."
    noise = ", which is less than the loss changes between reports" if share > _LOSS_TOLERANCE else ""
    return f"The final losses agree within {figures(100 * share, 2)} %{noise}: {values}."


def _noise(row: TierSummary) -> float:
    """Returns the median change of the loss between its last ten reports, the largest of the runs."""
    last = [[line.scalars.get(row.loss_name) for line in (run.reports or run.epochs)[-10:]] for run in row.group.runs]
    known = [[value for value in values if value is not None] for values in last]
    changes = [[abs(after - before) for before, after in pairwise(values)] for values in known]
    return max((statistics.median(each) for each in changes if each), default=0.0)


def _ends(rows: Sequence[TierSummary]) -> Iterator[str]:
    for row in rows:
        runs = row.group.runs
        bad = [run for run in runs if run.state != "done"]
        of = f"{len(bad)} of {len(runs)} repeats: " if row.done else ""
        yield from (f"{row.tier}: {of}{run.ending}." for run in bad[:1])
        if not runs:
            yield f"{row.tier}: it was not run."


def _startup(done: Sequence[TierSummary]) -> Iterator[str]:
    shares = {r.tier: r.startup_seconds / r.total_seconds for r in done if r.startup_seconds and r.total_seconds}
    much = {tier: share for tier, share in shares.items() if share > _MUCH_STARTUP}
    each = ", ".join(f"{tier} {100 * share:.0f} %" for tier, share in much.items())
    if len(much) > _MANY:
        most = max(much, key=lambda tier: much[tier])
        each = f"{len(much)} tiers, {100 * min(much.values()):.0f} to {100 * much[most]:.0f} %, the most on {most}"
    if much:
        yield f"Start-up is a large part of the total ({each}): it matters less in a longer run."


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
        estimate = collection.estimates.get(row.tier, {})
        seconds = estimate.get("seconds")
        if not seconds or not row.total_seconds:
            continue
        different = _different_job(estimate, row)
        if different:
            yield f"The estimate for {row.tier} is for another job ({different})."
        else:
            off = 100 * (seconds["middle"] / row.total_seconds - 1)
            inside = seconds["low"] <= row.total_seconds <= seconds["high"]
            yield (
                f"The estimate for {row.tier} was {figures(seconds['middle'])} s, the run took "
                f"{figures(row.total_seconds)} s: {abs(off):.0f} % too {'high' if off > 0 else 'low'}, "
                f"{'inside' if inside else 'outside'} its interval."
            )


def _predictions(rows: Sequence[TierSummary]) -> Iterator[str]:
    """Yields what the plans of jobs said when they were submitted, beside what was measured."""
    for row in rows:
        said = next((said for run in row.group.runs if (said := _numbers(mapping(run.result, "predicted")))), {})
        peaks = [number(peak) for run in row.group.runs for peak in items(run.result, "peak_device_memory_gib")]
        measured = {
            "step_seconds": (1e3, "ms/step", row.step_seconds.median if row.step_seconds else None),
            "device_gib": (1.0, "GiB of a device with what CUDA takes", largest(filter(None, peaks))),
        }
        parts = [
            f"{_range(said, name, factor)} {unit}, measured {figures(factor * value)}"
            for name, (factor, unit, value) in measured.items()
            if name in said and value is not None
        ]
        if parts:
            yield f"Predicted for {row.tier}: {'; '.join(parts)}."


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: valid for key, value in values.items() if (valid := number(value)) is not None}


def _range(said: Mapping[str, float], name: str, factor: float) -> str:
    low, middle, high = (figures(factor * said.get(key, said[name])) for key in (f"{name}_low", name, f"{name}_high"))
    return f"{middle} ({low} - {high})"


# Settings that do not change the work, or that the number of steps replaces.
_NOT_WORK = {"cache_dir", "epochs", "expect_devices", "job_dir", "profile_steps", "recipe", "report_every_steps"}


def _different_job(estimate: Mapping[str, Any], row: TierSummary) -> str:
    """Returns in what the estimated job differs from the one that ran; "" if it does not."""
    config = next((run.config for run in row.group.runs if run.config), {})
    estimated, ran = {**estimate["config"], "steps": estimate.get("steps")}, {**config, "steps": row.steps}
    names = ["steps", *sorted((estimated.keys() & ran.keys()) - {"steps", *_NOT_WORK})]
    shown = [f"{name}: {_known(estimated[name])} in the estimate, {_known(ran[name])} in the run" for name in names
             if estimated[name] is None or estimated[name] != ran[name]]  # fmt: skip
    return "; ".join(shown[:3])


def _known(value: Any) -> str:
    return "not known" if value is None else repr(value)


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
