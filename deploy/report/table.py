"""Shows the tiers as a table, in Markdown, CSV, JSON and for the terminal, with notes on how they were measured."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from deploy.report.collection import Collection
from deploy.report.formatting import markdown_table, terminal_table
from deploy.report.measures import MEASURES, SIMULATED, TierSummary, in_units, spread
from deploy.tiers.machine_table import load_machines


def shown(rows: Sequence[TierSummary]) -> list[list[str]]:
    """Returns the title and the cells of each measure of which any tier has a value; a missing value is empty."""
    lines = []
    for measure in MEASURES:
        values = [row.values[measure.key] for row in rows]
        if measure.title and any(value is not None for value in values):
            cells = ["" if value is None else measure.show(value) for value in values]
            if measure.key == "devices":
                cells = [
                    f"{cell} (simulated)" if row.simulated else cell for cell, row in zip(cells, rows, strict=True)
                ]
            lines.append([in_units(measure.title, rows), *cells])
    return lines


def to_terminal(rows: Sequence[TierSummary]) -> str:
    """Returns a table for the terminal. It has a column for each tier, so that many measures do not make it wide."""
    (_, *names), *lines = shown(rows)
    return terminal_table(["", *names], lines)


def to_markdown(rows: Sequence[TierSummary], below: Sequence[str]) -> str:
    """Returns a Markdown table with a row for each tier, and the lines `below` under it."""
    titles, *cells = zip(*shown(rows), strict=True)
    return markdown_table(titles, cells, below)


def to_csv(rows: Sequence[TierSummary]) -> str:
    """Returns all values as CSV with a row for each tier; a missing value is empty.

    A spread becomes the columns KEY (its median), KEY_low, KEY_high and KEY_count.
    """
    spreads = {measure.key for measure in MEASURES if measure.combine is spread}
    records = []
    for row in rows:
        record: dict[str, Any] = {}
        for key, value in row.values.items():
            record[key] = value
            if key in spreads:
                parts = asdict(value) if value else dict.fromkeys(("median", "low", "high", "count"))
                record |= {key if part == "median" else f"{key}_{part}": number for part, number in parts.items()}
        records.append({**record, "missing": "; ".join(f"{key}: {reason}" for key, reason in row.missing.items())})
    file = io.StringIO()
    writer = csv.DictWriter(file, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def to_json(rows: Sequence[TierSummary], remarks: Sequence[str], verdict: Sequence[str]) -> str:
    """Returns the values of the tiers in full precision, the verdict and the notes, as JSON."""
    content = {"tiers": [{**row.values, "missing": row.missing} for row in rows], "verdict": [*verdict]}
    return json.dumps({**content, "notes": [*remarks]}, indent=2, allow_nan=False, default=asdict) + "\n"


def notes(rows: Sequence[TierSummary], collection: Collection) -> Iterator[str]:
    """Yields the notes below a table: how it was measured, what is special about a tier, why a value is missing."""
    warm_up = sorted({row.warmup_steps for row in rows if row.warmup_steps is not None})
    if collection.scaling == "strong":
        yield "Strong scaling: the global batch is the same on every tier."
    if collection.scaling == "weak":
        yield "Weak scaling: the batch per replica is the same on every tier, the global batch grows with the devices."
    if warm_up:
        span = f"{warm_up[0]:,}" if len(warm_up) == 1 else f"{warm_up[0]:,} to {warm_up[-1]:,}"
        yield (
            "Medians, with the quartiles in brackets, of the time in training steps, without saving and evaluation; "
            f"{span} warm-up steps of each run are left out."
        )
    for title, key in (("loss", "loss_name"), ("accuracy", "accuracy_name")):
        names = sorted({name for row in rows if (name := row.values[key])})
        if names:
            yield f"Final {title} is {' or '.join(names)}."
    if any(row.price_per_hour is not None for row in rows):
        table = load_machines()
        yield f"Prices are estimates of {table.date} for {table.region} unless set by --price_per_hour."
    yield from (f"Simulated: {row.tier}: {row.simulated}." for row in rows if row.simulated)
    for row in rows:
        if row.depends_on_replicas:
            yield f"{row.tier}: its numbers are those of {row.devices} replicas alone (--allow_replica_dependence)."
        if row.not_compared:
            yield f"{row.tier}: its steps were not compared with those of one replica: {row.not_compared}."
        for times in (run.restarts for run in row.group.runs if run.restarts):
            yield f"{row.tier}: restarted {times} x: its total time includes each start-up."
    # One line for each reason for empty cells, with their columns and tiers. Simulated devices are left to the verdict.
    titles_by_reason: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for measure in MEASURES:
        if measure.title and any(row.values[measure.key] is not None for row in rows):
            reasons = {row.tier: row.missing.get(measure.key, SIMULATED) for row in rows}
            for reason in dict.fromkeys(reasons.values()):
                tiers = tuple(tier for tier, why in reasons.items() if why == reason != SIMULATED)
                titles_by_reason.setdefault((reason, tiers), []).append(in_units(measure.title, rows))
    for (reason, tiers), titles in titles_by_reason.items():
        if tiers:
            columns = ", ".join(titles) if len(titles) <= 10 else "measurements"
            yield f"No {columns} for {', '.join(tiers)}: {reason}."
    yield from (problem for run in collection.runs for problem in run.problems)
