"""Shows the tiers as a table, in Markdown, CSV, JSON and for the terminal, with notes on how they were measured."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from deploy.report import measures
from deploy.report.collection import Collection
from deploy.report.measures import NO_IMAGES, UNTOLD
from deploy.report.repeats import spread
from deploy.report.table import csv_text, markdown_table, terminal_table
from deploy.report.tier_summary import Measure, TierSummary, in_units
from deploy.tiers.machine_table import load_machines


def shown(rows: Sequence[TierSummary]) -> tuple[list[str], list[list[str]]]:
    """Returns titles and cells of the measures of which any tier has a value; a missing value is an empty cell."""
    values = [row.values for row in rows]
    some = [
        measure for measure in measures.MEASURES if measure.title and any(of[measure.key] is not None for of in values)
    ]
    cells = [[_cell(row, measure) for measure in some] for row in rows]
    return [in_units(measure.title, rows) for measure in some], cells


def transposed(rows: Sequence[TierSummary]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Returns the names of the tiers, and for each measure its title and its cells."""
    titles, cells = shown(rows)
    (_, *names), *lines = zip(titles, *cells, strict=True)
    return names, [*lines]


def _cell(row: TierSummary, measure: Measure) -> str:
    value = getattr(row, measure.key)
    text = "" if value is None else measure.show(value)
    return f"{text} (simulated)" if measure.key == "devices" and row.simulated else text


def to_terminal(rows: Sequence[TierSummary]) -> str:
    """Returns a table with a column for each tier: it stays narrow with any number of values."""
    names, lines = transposed(rows)
    return terminal_table(["", *names], lines)


def to_markdown(rows: Sequence[TierSummary], below: Sequence[str]) -> str:
    """Returns a Markdown table with the lines `below` it."""
    return markdown_table(*shown(rows), below)


def to_csv(rows: Sequence[TierSummary]) -> str:
    """Returns every value of every tier; a spread becomes NAME, NAME_low, NAME_high, NAME_count; missing is empty."""
    return csv_text([_flat(row) for row in rows])


def _flat(row: TierSummary) -> dict[str, Any]:
    record: dict[str, Any] = {}
    spreads = {measure.key for measure in measures.MEASURES if measure.combine is spread}
    for key, value in row.values.items():
        record[key] = value
        if key in spreads:
            parts = dataclasses.asdict(value) if value else dict.fromkeys(("median", "low", "high", "count"))
            record |= {key if part == "median" else f"{key}_{part}": number for part, number in parts.items()}
    return {**record, "missing": "; ".join(f"{key}: {reason}" for key, reason in row.missing.items())}


def to_json(rows: Sequence[TierSummary], remarks: Sequence[str], verdict: Sequence[str]) -> str:
    """Returns the tiers with full precision, the verdict and the notes."""
    tiers = [{**row.values, "missing": row.missing} for row in rows]
    content = {"tiers": tiers, "verdict": [*verdict], "notes": [*remarks]}
    return json.dumps(content, indent=2, allow_nan=False, default=dataclasses.asdict) + "\n"


def notes(rows: Sequence[TierSummary], collection: Collection) -> list[str]:
    """Returns the notes below a table: how it was measured, what is simulated, why a value is missing."""
    warm_up = sorted({row.warmup_steps for row in rows if row.warmup_steps is not None})
    lines = [_SCALING[collection.scaling]] if collection.scaling in _SCALING else []
    if warm_up:
        span = f"{warm_up[0]:,}" if len(warm_up) == 1 else f"{warm_up[0]:,} to {warm_up[-1]:,}"
        lines.append(
            "Medians, with the quartiles in brackets, of the time in training steps, without saving and evaluation; "
            f"{span} warm-up steps of each run are left out."
        )
    losses = sorted({row.loss_name for row in rows if row.loss_name})
    lines += [f"Final loss is {' or '.join(losses)}."] if losses else []
    accuracies = sorted({row.accuracy_name for row in rows if row.accuracy_name})
    lines += [f"Final accuracy is {' or '.join(accuracies)}."] if accuracies else []
    if any(row.price_per_hour is not None for row in rows):
        table = load_machines()
        lines.append(f"Prices are estimates of {table.date} for {table.region} unless set by --price_per_hour.")
    lines += [f"Simulated: {row.tier}: {row.simulated}." for row in rows if row.simulated]
    lines += [
        f"{row.tier}: its numbers are those of {row.devices} replicas alone (--allow_replica_dependence)."
        for row in rows
        if row.depends_on_replicas
    ]
    lines += [
        f"{tier.name}: restarted {'once' if run.restarts == 1 else f'{run.restarts} times'}: its total time includes "
        "each start-up."
        for tier in collection.tiers
        for run in tier.runs
        if run.restarts
    ]
    lines += [f"The comparison in {name} is left out: add its folder to the command." for name in collection.left_out]
    return [*lines, *_reasons(rows), *(problem for run in collection.runs for problem in run.problems)]


_SCALING: dict[str | None, str] = {
    "strong": "Strong scaling: the global batch is the same on every tier.",
    "weak": "Weak scaling: the batch per replica is the same on every tier, the global batch grows with the devices.",
}


_MANY = 10  # more columns with one reason are called measurements


def _reasons(rows: Sequence[TierSummary]) -> list[str]:
    """Returns one line for each reason, with its columns and tiers."""
    tiers: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for measure in measures.MEASURES:
            if measure.title and row.missing.get(measure.key, NO_IMAGES) not in UNTOLD:
                tiers.setdefault((in_units(measure.title, rows), row.missing[measure.key]), []).append(row.tier)
    together: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for (title, reason), names in tiers.items():
        together.setdefault((reason, tuple(names)), {})[title.partition(":")[0]] = None  # one word for all of a profile
    return [
        f"No {', '.join(titles) if len(titles) <= _MANY else 'measurements'} "
        f"for {'any tier' if len(names) == len(rows) else ', '.join(names)}: {reason}."
        for (reason, names), titles in together.items()
    ]
