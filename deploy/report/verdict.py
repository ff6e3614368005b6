"""Writes the verdict of a comparison: the fastest, cheapest and best tier, and what makes the results unreliable."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from deploy.report.collection import Collection, TierRuns
from deploy.report.run_reader import Run
from deploy.report.summary import UNKNOWN, UNKNOWN_MACHINE, TierSummary, in_units
from deploy.report.table import counted_devices, figures, money, percent
from deploy.report.timing import Spread
from trainer.config.train_config import MAY_CHANGE
from trainer.reporting.breakdown import INPUT, KINDS, MUCH, WORDS, advice

_RESOLUTION = 0.01  # speeds that differ by less are equal, also without a known spread
_LOSS_TOLERANCE = 0.05  # of the larger loss
_MUCH_STARTUP = 0.2  # of the total time
_MANY = 4  # tiers that are named one by one
_MORE_WORK = "use a larger batch per replica or a larger model."


def verdict(collection: Collection, rows: Sequence[TierSummary], baseline: str = "") -> list[str]:
    """Returns sentences, the most important first. `baseline`: the tier of the speed-ups, by default the first.

    Only speeds of real devices are compared.
    """
    done = [row for row in rows if row.state == "done" and row.images_per_second]
    real = [row for row in done if not row.simulated]
    sentences = [
        *_simulated(collection, rows),
        *(_ranking(real, baseline or rows[0].tier) if real or not done else ()),
        *_scaling(real),
        *_communication(real),
        *_causes(collection, real),
        *_different_work(collection, rows),
        *_losses(collection, done),
        *_ends(collection, rows),
        *_startup(done),
        *_estimates(collection, rows),
        *_predictions(collection, rows),
    ]
    return [in_units(sentence, rows) for sentence in sentences]


def equal(one: Spread, other: Spread) -> bool:
    """Returns whether two medians differ by no more than the larger interquartile range, or than 1 %."""
    tolerance = max(one.width, other.width, _RESOLUTION * max(one.median, other.median))
    return abs(one.median - other.median) <= tolerance


def _speed(row: TierSummary) -> Spread:
    assert row.images_per_second is not None, "only rows that have a speed are compared"
    return row.images_per_second


def _ranking(done: Sequence[TierSummary], baseline: str) -> Iterator[str]:
    if len(done) < 2:
        yield "No verdict: fewer than two tiers have a speed to compare."
        return
    fastest = max(done, key=lambda row: _speed(row).median)
    compared = fastest.speed_up and baseline in (row.tier for row in done) and fastest.tier != baseline
    against = f", {fastest.speed_up:.2f} x {baseline}" if compared else ""
    ties = [row.tier for row in done if row is not fastest and equal(_speed(row), _speed(fastest))]
    tied = f"; {_and(ties)} {'is' if len(ties) == 1 else 'are'} equal within the spread" if ties else ""
    yield f"Fastest: {fastest.tier}, {figures(_speed(fastest).median)} images/s{against}{tied}."
    yield from _costs(done)


def _costs(done: Sequence[TierSummary]) -> Iterator[str]:
    """Yields the cheapest and the best tier of those with a cost, and why the others have none."""
    priced = [(row, row.cost_per_million_images) for row in done if row.cost_per_million_images is not None]
    left_out: dict[str, list[str]] = {}
    for row in done:
        if row.cost_per_million_images is None:
            left_out.setdefault(_no_cost(row), []).append(row.tier)
    note = f" ({'; '.join(f'{_and(tiers)}: {why}' for why, tiers in left_out.items())})" if left_out else ""
    if len(priced) < 2:
        yield f"Cheapest and best buy are not known{note}."
        return
    cheapest, price = min(priced, key=lambda pair: pair[1])
    yield f"Cheapest: {cheapest.tier}, {money(price)} per million images{note}."
    best = min(priced, key=lambda pair: pair[1] / _speed(pair[0]).median)[0]
    yield f"Best buy: {best.tier}, the lowest product of time and cost{note}."


def _no_cost(row: TierSummary) -> str:
    if row.price_per_hour is None:
        return "no price"
    return UNKNOWN_MACHINE if row.kind == UNKNOWN else "ran on this machine"


def _scaling(done: Sequence[TierSummary]) -> Iterator[str]:
    """Compares the tiers of each kind with the one of fewest devices, and names those that more devices do not help."""
    by_kind: dict[str, list[TierSummary]] = {}
    for row in sorted(done, key=lambda row: (row.devices, -_speed(row).median)):
        if row.kind != UNKNOWN:
            by_kind.setdefault(row.kind, []).append(row)
    for first, *others in by_kind.values():
        faster, exceptions = [], []
        for row in others:
            fewer = [other for other in (first, *others) if other.devices < row.devices]
            if not fewer:
                continue
            exception = _no_gain(row, max(fewer, key=lambda other: _speed(other).median))
            if exception:
                exceptions.append(exception)
            else:
                faster.append(f"{row.tier} ({counted_devices(row.devices)}) {_gain(row, first)}")
        if faster:
            yield f"Against {first.tier} ({counted_devices(first.devices)}): {', '.join(faster)}."
        yield from exceptions


def _gain(row: TierSummary, first: TierSummary) -> str:
    ratio = f"{_speed(row).median / _speed(first).median:.2f} x as fast"
    if not (row.cost_per_million_images and first.cost_per_million_images):
        return ratio
    return (
        f"{ratio} for {row.cost_per_million_images / first.cost_per_million_images:.2f} x the cost per million images"
    )


def _no_gain(row: TierSummary, other: TierSummary) -> str:
    """Returns that a tier is not faster than another one with fewer devices; "" if it is."""
    if equal(_speed(row), _speed(other)):
        one, two = (f"{each.tier} ({counted_devices(each.devices)})" for each in (row, other))
        return f"{one} and {two} are equally fast, within the spread; {_MORE_WORK}"
    ratio = _speed(row).median / _speed(other).median
    slower = f"{row.devices} devices are slower than {other.devices}"
    return f"{slower}: {row.tier} reaches {ratio:.2f} x {other.tier}; {_MORE_WORK}" if ratio < 1 else ""


def _communication(done: Sequence[TierSummary]) -> Iterator[str]:
    """Measures communication: the time of a step beyond that of one such device with the same batch per replica."""
    for row in done:
        single = next((other for other in done if _is_single(other, row)), None)
        if single is None or single.step_seconds is None or row.step_seconds is None:
            continue
        if equal(single.step_seconds, row.step_seconds) or row.step_seconds.median < single.step_seconds.median:
            yield f"{row.tier}: communication takes less of a step than the spread (compared with {single.tier})."
        else:
            share = 1 - single.step_seconds.median / row.step_seconds.median
            yield (
                f"{row.tier}: {100 * share:.0f} % of a step is communication and waiting, measured as the time beyond "
                f"a step of {single.tier}, which is one device with the same batch per replica."
            )


def _causes(collection: Collection, done: Sequence[TierSummary]) -> Iterator[str]:
    """Says what the time of a step goes to, what to do about it, and how that shifts between the tiers."""
    tried = {tier.name: [each for run in tier.runs for each in run.tried] for tier in collection.tiers}
    for row in done:
        yield from (f"{row.tier}: {line}." for line in advice(_shares(row), tried[row.tier]))
    profiled = [(row.tier, _shares(row)) for row in done if row.profile_matrix is not None]
    for kind in KINDS:
        (one, least), (other, most) = (
            choose(((tier, shares[kind]) for tier, shares in profiled), key=lambda pair: pair[1], default=("", 0.0))
            for choose in (min, max)
        )
        if most - least >= MUCH:
            yield f"{WORDS[kind].capitalize()} is {percent(least)} of a step on {one}, {percent(most)} on {other}."


def _shares(row: TierSummary) -> dict[str, float]:
    """Returns the shares of the tier's profile; without one, that of waiting for input if it is much."""
    if row.profile_matrix is not None:
        return {kind: getattr(row, f"profile_{kind}") for kind in KINDS}
    return {INPUT: row.input_wait} if row.input_wait is not None and row.input_wait >= MUCH else {}


def _is_single(single: TierSummary, row: TierSummary) -> bool:
    named = bool(single.machine and row.machine)
    same = single.kind == row.kind and single.batch_per_replica == row.batch_per_replica is not None
    return named and same and single.devices == 1 < row.devices


def _different_work(collection: Collection, rows: Sequence[TierSummary]) -> Iterator[str]:
    images = {row.tier: row.images for row in rows if row.images is not None and row.state == "done"}
    if len(set(images.values())) > 1:
        shown = ", ".join(f"{tier} {count:,}" for tier, count in images.items())
        yield f"Different work: images read: {shown}. Compare images/s, not totals."
    scaled = {"global_batch_size"} if collection.scaling == "weak" else set()
    for name, values in _differing(collection.tiers, MAY_CHANGE | scaled).items():
        yield f"Different work: {name} is {', '.join(f'{value!r} ({tier})' for tier, value in values.items())}."


def _differing(tiers: Sequence[TierRuns], may_differ: frozenset[str] | set[str]) -> dict[str, dict[str, Any]]:
    """Returns the settings in which the first runs of the tiers differ, with each tier's value."""
    configs = {tier.name: tier.runs[0].config for tier in tiers if tier.runs and tier.runs[0].config}
    names = sorted({name for config in configs.values() for name in config} - may_differ)
    found = {name: {tier: config.get(name) for tier, config in configs.items()} for name in names}
    return {name: values for name, values in found.items() if len({repr(value) for value in values.values()}) > 1}


def _losses(collection: Collection, done: Sequence[TierSummary]) -> Iterator[str]:
    """Says how close the final losses are, and names those that differ too much from the first tier's."""
    if collection.scaling == "weak":
        return  # with another global batch, other losses are expected
    runs = {tier.name: tier.runs for tier in collection.tiers}
    rows = [row for row in done if row.final_loss is not None]
    differences = [line for row in rows[1:] if (line := _different_loss(row, rows[0], runs))]
    yield from differences or ([_agreement(rows)] if len(rows) > 1 else [])


def _loss(row: TierSummary) -> float:
    assert row.final_loss is not None, "only rows that have a loss are compared"
    return row.final_loss


def _different_loss(row: TierSummary, first: TierSummary, runs: Mapping[str, Sequence[Run]]) -> str:
    """Returns that two losses differ by more than 5 %, and by more than the loss changes between reports; "" if not."""
    if row.loss_name != first.loss_name:
        return f"Final losses cannot be compared: {row.loss_name} of {row.tier}, {first.loss_name} of {first.tier}."
    name = row.loss_name or ""
    noise = max(_noise(runs[row.tier], name), _noise(runs[first.tier], name))
    if abs(_loss(row) - _loss(first)) <= max(_LOSS_TOLERANCE * _larger(row, first), noise):
        return ""
    return (
        f"Different final losses: {name} {figures(_loss(row))} on {row.tier}, {figures(_loss(first))} on {first.tier}: "
        "rounding alone can do that in a short run; if the training differs, which `python -m trainer.check` tells, "
        "the speeds are not comparable."
    )


def _larger(row: TierSummary, other: TierSummary) -> float:
    return max(abs(_loss(row)), abs(_loss(other)))


def _agreement(rows: Sequence[TierSummary]) -> str:
    """Returns within what the losses of tiers that do not differ too much agree."""
    shown = list(dict.fromkeys(figures(loss) for loss in sorted(map(_loss, rows))))
    values = f"{rows[0].loss_name} {' to '.join([shown[0], shown[-1]][: len(shown)])}"
    share = max(abs(_loss(row) - _loss(rows[0])) / (_larger(row, rows[0]) or 1.0) for row in rows)
    if share == 0:
        return f"The final losses are equal: {values}."
    noise = ", which is less than the loss changes between reports" if share > _LOSS_TOLERANCE else ""
    return f"The final losses agree within {figures(100 * share, 2)} %{noise}: {values}."


def _noise(runs: Sequence[Run], name: str) -> float:
    """Returns the median change of a scalar between its last ten reports, the largest of the runs."""
    last = [[line.scalars[name] for line in (run.reports or run.epochs)[-10:] if name in line.scalars] for run in runs]
    changes = [[abs(after - before) for before, after in pairwise(values)] for values in last]
    return max((statistics.median(each) for each in changes if each), default=0.0)


def _ends(collection: Collection, rows: Sequence[TierSummary]) -> Iterator[str]:
    for row, tier in zip(rows, collection.tiers, strict=True):
        bad = [run for run in tier.runs if run.state != "done"]
        of = f"{len(bad)} of {len(tier.runs)} repeats: " if row.state == "done" else ""
        for run in bad[:1]:
            yield f"{tier.name}: {of}{run.ending}."
        if not tier.runs:
            yield f"{tier.name}: it was not run."


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
    for row, tier in zip(rows, collection.tiers, strict=True):
        estimate = collection.estimates.get(row.tier, {})
        seconds = estimate.get("seconds")
        if not seconds or not row.total_seconds:
            continue
        other = _other_job(estimate, row, tier.runs)
        if other:
            yield f"The estimate for {row.tier} is for another job ({other})."
        else:
            off = 100 * (seconds["middle"] / row.total_seconds - 1)
            inside = seconds["low"] <= row.total_seconds <= seconds["high"]
            yield (
                f"The estimate for {row.tier} was {figures(seconds['middle'])} s, the run took "
                f"{figures(row.total_seconds)} s: {abs(off):.0f} % too {'high' if off > 0 else 'low'}, "
                f"{'inside' if inside else 'outside'} its interval."
            )


def _predictions(collection: Collection, rows: Sequence[TierSummary]) -> Iterator[str]:
    """Yields what the plans of jobs said when they were submitted, beside what was measured."""
    for row, tier in zip(rows, collection.tiers, strict=True):
        said = next((run.predicted for run in tier.runs if run.predicted), {})
        peak = max((run.peak_device_gib for run in tier.runs if run.peak_device_gib is not None), default=None)
        parts = [
            f"{_range(said, name, factor)} {unit}, measured {figures(factor * value)}"
            for name, factor, unit, value in (
                ("step_seconds", 1e3, "ms/step", row.step_seconds.median if row.step_seconds else None),
                ("device_gib", 1.0, "GiB of a device with what CUDA takes", peak),
            )
            if name in said and value is not None
        ]
        if parts:
            yield f"Predicted for {row.tier}: {'; '.join(parts)}."


def _range(said: Mapping[str, float], name: str, factor: float) -> str:
    low, middle, high = (figures(factor * said.get(key, said[name])) for key in (f"{name}_low", name, f"{name}_high"))
    return f"{middle} ({low} - {high})"


# Settings that do not change the work, or that the number of steps replaces.
_NOT_WORK = {
    "recipe",
    "job_dir",
    "cache_dir",
    "epochs",
    "steps",
    "expect_devices",
    "report_every_steps",
    "profile_steps",
}


def _other_job(estimate: Mapping[str, Any], row: TierSummary, runs: Sequence[Run]) -> str:
    """Returns in what the estimated job differs from the one that ran; "" if it does not."""
    config = next((run.config for run in runs if run.config), {})
    estimated, ran = {**estimate["config"], "steps": estimate.get("steps")}, {**config, "steps": row.steps}
    names = ["steps", *sorted((estimated.keys() & ran.keys()) - _NOT_WORK)]
    shown = [f"{name}: {_known(estimated[name])} in the estimate, {_known(ran[name])} in the run" for name in names
             if estimated[name] is None or estimated[name] != ran[name]]  # fmt: skip
    return "; ".join(shown[:3])


def _known(value: Any) -> str:
    return "not known" if value is None else repr(value)


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
