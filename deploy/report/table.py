"""Shows the tiers as a table, in Markdown, JSON and for the terminal, with notes on how they were
measured."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from deploy.report.collection import Collection
from deploy.report.formatting import grouped, markdown_table, terminal_table
from deploy.report.measures import FIRST, MEASURES, Rows, in_units
from deploy.tiers.machine_table import load_machines


def table_lines(rows: Rows, *, first: bool = False) -> list[list[str]]:
    """Returns the title and the cells of each measure of which any tier has a value; a missing
    value is empty.

    `first`: only those of the first screen.
    """
    lines = []
    for measure in MEASURES:
        values = [row.values[measure.key] for row in rows]
        has_row = measure.key in ("tier", *FIRST) if first else measure.title
        if has_row and any(value is not None for value in values):
            cells = ["" if value is None else measure.show(value) for value in values]
            lines.append([in_units(measure.title, rows), *cells])
    return lines


def to_terminal(rows: Rows) -> str:
    """Returns the first measures as a table for the terminal, with a column for each tier."""
    (_, *names), *lines = table_lines(rows, first=True)
    return terminal_table(["", *names], lines)


def to_markdown(rows: Rows, below: Sequence[str]) -> str:
    """Returns a Markdown table with a row for each tier, and the lines `below` under it."""
    titles, *cells = zip(*table_lines(rows), strict=True)
    return markdown_table(titles, cells, below)


def to_json(rows: Rows, remarks: Sequence[str], verdict: Sequence[str]) -> str:
    """Returns the values of the tiers in full precision, the verdict and the notes, as JSON."""
    content = {
        "tiers": [{**row.values, "missing": [*row.missing]} for row in rows],
        "verdict": [*verdict],
        "notes": [*remarks],
    }
    return json.dumps(content, indent=2, allow_nan=False, default=asdict) + "\n"


def notes(rows: Rows, collection: Collection) -> Iterator[str]:
    """Yields the notes below a table: why values are missing, and how they were measured."""
    reasons = grouped((reason, row.tier) for row in rows for reason in row.missing)
    yield from (f"{tiers}: {reason}." for reason, tiers in reasons.items())
    if collection.scaling == "weak":
        yield (
            "Weak scaling: the batch per replica is the same on every tier, the global batch grows"
            " with the devices."
        )
    if any(row.has_speed for row in rows):
        yield (
            "Medians, with the quartiles in brackets, of the time in training steps, without saving"
            " and evaluation and without the first report of each start."
        )
    if any(row.price_per_hour is not None for row in rows):
        table = load_machines()
        yield (
            f"Prices are estimates of {table.date} for {table.region} unless set by"
            " --price_per_hour."
        )
    for run in collection.runs:
        if run.restarts:
            yield (
                f"{run.folder.name}: restarted {run.restarts} x: its total time includes each"
                " start-up."
            )
        yield from run.problems
