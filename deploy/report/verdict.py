"""What a comparison says, in words: the fastest, the cheapest, the best buy, and what must not be believed."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from deploy.report.collection import Collection, TierRuns
from deploy.report.rows import UNKNOWN, UNSAID, Row
from deploy.report.run_reader import Run
from deploy.report.table import counted_devices, figures, money
from deploy.report.timing import Spread
from trainer.config.train_config import MAY_CHANGE

_RESOLUTION = 0.01  # speeds nearer than this are equal even where no spread is known
_LOSS_TOLERANCE = 0.05  # of the larger loss
_MUCH_STARTUP = 0.2  # of the total time


def verdict(collection: Collection, rows: Sequence[Row], baseline: str = "") -> list[str]:
    """Sentences, the most important first. `baseline`: what the speed-ups are against, by default the first tier.

    Speeds are compared between real devices alone.
    """
    done = [row for row in rows if row.state == "done" and row.images_per_second]
    real = [row for row in done if not row.simulated]
    return [
        *_simulated(collection, rows),
        *(_buys(real, baseline or rows[0].tier) if real or not done else ()),
        *_scaling(real),
        *_communication(real),
        *_not_the_same_work(collection, rows),
        *_losses(collection, done),
        *_ends(collection, rows),
        *_startup(done),
        *_estimates(collection, rows),
    ]


def equal(one: Spread, other: Spread) -> bool:
    """Whether two medians are nearer than the wider interquartile range, or than 1 %."""
    tolerance = max(one.width, other.width, _RESOLUTION * max(one.median, other.median))
    return abs(one.median - other.median) <= tolerance


def _speed(row: Row) -> Spread:
    assert row.images_per_second is not None, "only rows that have a speed are compared"
    return row.images_per_second


def _buys(done: Sequence[Row], baseline: str) -> Iterator[str]:
    if len(done) < 2:
        yield "No verdict: fewer than two tiers have a speed to compare."
        return
    fastest = max(done, key=lambda row: _speed(row).median)
    held = fastest.speed_up and baseline in (row.tier for row in done) and fastest.tier != baseline
    against = f", {fastest.speed_up:.2f} x {baseline}" if held else ""
    ties = [row.tier for row in done if row is not fastest and equal(_speed(row), _speed(fastest))]
    tied = f"; {_and(ties)} {'is' if len(ties) == 1 else 'are'} equal within the spread" if ties else ""
    yield f"Fastest: {fastest.tier}, {figures(_speed(fastest).median)} images/s{against}{tied}."
    yield from _money(done)


def _money(done: Sequence[Row]) -> Iterator[str]:
    """The cheapest and the best buy of those that have a cost, and why the others have none."""
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
    yield f"Best buy: {best.tier}, the lowest product of time and money{note}."


def _no_cost(row: Row) -> str:
    if row.price_per_hour is None:
        return "no price"
    return UNSAID if row.kind == UNKNOWN else "ran on this machine"


def _scaling(done: Sequence[Row]) -> Iterator[str]:
    """Each tier against the fastest one with fewer devices of its kind."""
    for row in done:
        fewer = [other for other in done if other.kind == row.kind != UNKNOWN and other.devices < row.devices]
        if not fewer:
            continue
        other = max(fewer, key=lambda other: _speed(other).median)
        ratio = _speed(row).median / _speed(other).median
        one, two = (f"{each.tier} ({counted_devices(each.devices)})" for each in (row, other))
        if equal(_speed(row), _speed(other)):
            yield f"{one} and {two} are equally fast, within the spread; {_MORE_WORK}"
        elif ratio < 1:
            yield (
                f"{row.devices} devices are slower than {other.devices}: {row.tier} reaches {ratio:.2f} x "
                f"{other.tier}; {_MORE_WORK}"
            )
        else:
            yield f"{one} reaches {ratio:.2f} x {two}."


_MORE_WORK = "a larger batch per replica or a bigger model is needed."


def _communication(done: Sequence[Row]) -> Iterator[str]:
    """Where one device of the same kind was timed with the same batch per replica, the rest of a step is measured."""
    for row in done:
        alone = next((other for other in done if _same_but_alone(other, row)), None)
        if alone is None or alone.step_seconds is None or row.step_seconds is None:
            continue
        if equal(alone.step_seconds, row.step_seconds) or row.step_seconds.median < alone.step_seconds.median:
            yield f"{row.tier}: communication takes no more of a step than the spread (against {alone.tier})."
        else:
            share = 1 - alone.step_seconds.median / row.step_seconds.median
            yield (
                f"{row.tier}: {100 * share:.0f} % of a step is communication and waiting, measured as what it takes "
                f"beyond the step of {alone.tier}, one device with the same batch per replica."
            )


def _same_but_alone(alone: Row, row: Row) -> bool:
    named = bool(alone.machine and row.machine)
    same = alone.kind == row.kind and alone.batch_per_replica == row.batch_per_replica is not None
    return named and same and alone.devices == 1 < row.devices


def _not_the_same_work(collection: Collection, rows: Sequence[Row]) -> Iterator[str]:
    images = {row.tier: row.images for row in rows if row.images is not None and row.state == "done"}
    if len(set(images.values())) > 1:
        shown = ", ".join(f"{tier} {count:,}" for tier, count in images.items())
        yield f"Not the same work: images read: {shown}. Compare images/s, not totals."
    grows = {"global_batch_size"} if collection.scaling == "weak" else set()
    for name, values in _differing(collection.tiers, MAY_CHANGE | grows).items():
        yield f"Not the same work: {name} is {', '.join(f'{value!r} ({tier})' for tier, value in values.items())}."


def _differing(tiers: Sequence[TierRuns], may_differ: frozenset[str] | set[str]) -> dict[str, dict[str, Any]]:
    """Settings in which the first runs of the tiers differ, with each tier's value."""
    configs = {tier.name: tier.runs[0].config for tier in tiers if tier.runs and tier.runs[0].config}
    names = sorted({name for config in configs.values() for name in config} - may_differ)
    found = {name: {tier: config.get(name) for tier, config in configs.items()} for name in names}
    return {name: values for name, values in found.items() if len({repr(value) for value in values.values()}) > 1}


def _losses(collection: Collection, done: Sequence[Row]) -> Iterator[str]:
    """Final losses further apart than 5 %, and than the loss itself moves from report to report."""
    if collection.scaling == "weak":
        return  # another global batch is another training
    runs = {tier.name: tier.runs for tier in collection.tiers}
    first = next((row for row in done if row.final_loss is not None), None)
    for row in done:
        if first is None or row is first or row.final_loss is None or first.final_loss is None:
            continue
        if row.loss_name != first.loss_name:
            yield f"Final losses cannot be compared: {row.loss_name} of {row.tier}, {first.loss_name} of {first.tier}."
            continue
        name = row.loss_name or ""
        noise = max(_noise(runs[row.tier], name), _noise(runs[first.tier], name))
        larger = max(abs(row.final_loss), abs(first.final_loss))
        if abs(row.final_loss - first.final_loss) > max(_LOSS_TOLERANCE * larger, noise):
            yield (
                f"Different final losses: {name} {figures(row.final_loss)} on {row.tier}, {figures(first.final_loss)} "
                f"on {first.tier}: this is not the same training, and its speeds are no fair comparison."
            )


def _noise(runs: Sequence[Run], name: str) -> float:
    """The median change of a scalar between neighbours of its last ten reports, the largest of the runs."""
    return max((_typical_change(run, name) for run in runs), default=0.0)


def _typical_change(run: Run, name: str) -> float:
    values = [window.scalars[name] for window in (run.reports or run.epochs)[-10:] if name in window.scalars]
    changes = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(changes) if changes else 0.0


def _ends(collection: Collection, rows: Sequence[Row]) -> Iterator[str]:
    for row, tier in zip(rows, collection.tiers, strict=True):
        bad = [run for run in tier.runs if run.state != "done"]
        of = f"{len(bad)} of {len(tier.runs)} repeats: " if row.state == "done" else ""
        for run in bad[:1]:
            yield f"{tier.name}: {of}{run.ending}."
        if not tier.runs:
            yield f"{tier.name}: it was not run."


def _startup(done: Sequence[Row]) -> Iterator[str]:
    shares = {r.tier: r.startup_seconds / r.total_seconds for r in done if r.startup_seconds and r.total_seconds}
    much = [f"{tier} {100 * share:.0f} %" for tier, share in shares.items() if share > _MUCH_STARTUP]
    if much:
        yield f"Start-up is a large part of the total ({', '.join(much)}): a longer run loses less by it."


def _simulated(collection: Collection, rows: Sequence[Row]) -> Iterator[str]:
    names = [row.tier for row in rows if row.simulated]
    if names:
        yield (
            f"Simulated devices: {_and(names)}: their speeds say nothing of real machines, so none is called fast or "
            "slow, and there is no efficiency and no cost."
        )
    if collection.at_desk and collection.parallel > 1:
        yield f"Up to {collection.parallel} runs shared this machine and slowed each other down: use --parallel=1."


def _estimates(collection: Collection, rows: Sequence[Row]) -> Iterator[str]:
    for row, tier in zip(rows, collection.tiers, strict=True):
        estimate = collection.estimates.get(row.tier, {})
        seconds = estimate.get("seconds")
        if not seconds or not row.total_seconds:
            continue
        other = _other_job(estimate, row, tier.runs)
        if other:
            yield f"The estimate for {row.tier} is of another job ({other})."
        else:
            off = 100 * (seconds["middle"] / row.total_seconds - 1)
            inside = seconds["low"] <= row.total_seconds <= seconds["high"]
            yield (
                f"The estimate for {row.tier} was {figures(seconds['middle'])} s, it took "
                f"{figures(row.total_seconds)} s: {abs(off):.0f} % too {'high' if off > 0 else 'low'}, "
                f"{'inside' if inside else 'outside'} its interval."
            )


# Settings that say nothing of the work, or that the number of steps stands for.
_NOT_THE_WORK = {"recipe", "job_dir", "cache_dir", "epochs", "steps", "expect_devices", "report_every_steps"}


def _other_job(estimate: Mapping[str, Any], row: Row, runs: Sequence[Run]) -> str:
    """In what the job that was estimated differs from the one that ran; empty where it does not."""
    config = next((run.config for run in runs if run.config), {})
    there, here = {**estimate["config"], "steps": estimate.get("steps")}, {**config, "steps": row.steps}
    names = ["steps", *sorted((there.keys() & here.keys()) - _NOT_THE_WORK)]
    shown = [f"{name}: {_known(there[name])} there, {_known(here[name])} here" for name in names
             if there[name] is None or there[name] != here[name]]  # fmt: skip
    return "; ".join(shown[:3])


def _known(value: Any) -> str:
    return "not known" if value is None else repr(value)


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
