"""Formats the tiers as a table: for the terminal, as Markdown, CSV, JSON and for the HTML report."""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.report.collection import Collection
from deploy.report.summary import NO_IMAGES, TierSummary, in_units
from deploy.report.timing import Spread
from deploy.spec.machine_table import load_machines
from trainer.reporting.breakdown import WORDS


def figures(value: float, digits: int = 3) -> str:
    """Formats `digits` significant digits, thousands with commas: 12,300; 8.10; 0.00786."""
    if value == 0:
        return "0"
    rounded = f"{value:.{digits - 1}e}"
    exponent = int(rounded.partition("e")[2])
    return f"{float(rounded):,.{max(0, digits - 1 - exponent)}f}"


def money(value: float) -> str:
    """Formats USD with cents, or three digits if it is less than one dollar."""
    exact = f"{value:,.2f}"
    return f"${exact}" if abs(value) >= 1 or float(exact) == value else f"${figures(value)}"


def percent(share: float) -> str:
    """Formats a share of 1: `41 %`."""
    return f"{100 * share:.0f} %"


def counted_devices(count: int) -> str:
    """Formats a number of devices: `1 device`, `2 devices`."""
    return "1 device" if count == 1 else f"{count} devices"


def with_spread(value: Spread, factor: float = 1.0) -> str:
    """Formats the median and, of several values, the quartiles: `8.10 (7.90 - 8.40)`."""
    middle, low, high = (figures(factor * part) for part in (value.median, value.low, value.high))
    return middle if value.count == 1 else f"{middle} ({low} - {high})"


@dataclass(frozen=True)
class Column:
    """Describes a column: the field of TierSummary, the title with the unit, and the format of a value."""

    key: str
    title: str
    text: Callable[[Any], str]


COLUMNS = (
    Column("tier", "tier", str),
    Column("state", "state", str),
    Column("machine", "machine", str),
    Column("devices", "devices", str),
    Column("repeats", "repeats", str),
    Column("batch_per_replica", "batch per replica", str),
    Column("global_batch", "global batch", str),
    Column("steps", "steps", "{:,}".format),
    Column("step_seconds", "ms/step", lambda value: with_spread(value, 1e3)),
    Column("epoch_seconds", "s/epoch", with_spread),
    Column("images_per_second", "images/s", with_spread),
    Column("speed_up", "speed-up", "{:.2f} x".format),
    Column("efficiency", "efficiency", percent),
    Column("input_wait", "waits for input", percent),
    *(Column(f"profile_{kind}", f"profile: {words}", percent) for kind, words in WORDS.items()),
    Column("startup_seconds", "start-up s", figures),
    Column("total_seconds", "total s", figures),
    Column("price_per_hour", "price an hour", money),
    Column("cost", "cost of the run", money),
    Column("cost_per_million_images", "cost per million images", money),
    Column("final_loss", "final loss", figures),
    Column("final_accuracy", "final accuracy", "{:.4f}".format),
    Column("fid", "FID", figures),
    Column("coverage", "coverage", figures),
    Column("peak_memory_gib", "peak memory GiB", figures),
    Column("peak_gpu_memory_gib", "peak GPU memory GiB", figures),
)


def shown(rows: Sequence[TierSummary]) -> tuple[list[str], list[list[str]]]:
    """Returns titles and cells of the columns in which any tier has a value; a missing value is an empty cell."""
    columns = [column for column in COLUMNS if any(getattr(row, column.key) is not None for row in rows)]
    return [in_units(column.title, rows) for column in columns], [
        [_cell(row, column) for column in columns] for row in rows
    ]


def _cell(row: TierSummary, column: Column) -> str:
    value = getattr(row, column.key)
    text = "" if value is None else column.text(value)
    return f"{text} (simulated)" if column.key == "devices" and row.simulated else text


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
        for column in COLUMNS:
            if row.missing.get(column.key, NO_IMAGES) != NO_IMAGES:
                tiers.setdefault((in_units(column.title, rows), row.missing[column.key]), []).append(row.tier)
    together: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for (title, reason), names in tiers.items():
        together.setdefault((reason, tuple(names)), {})[title.partition(":")[0]] = None  # one word for all of a profile
    return [
        f"No {', '.join(titles) if len(titles) <= _MANY else 'measurements'} "
        f"for {'any tier' if len(names) == len(rows) else ', '.join(names)}: {reason}."
        for (reason, names), titles in together.items()
    ]


def to_markdown(rows: Sequence[TierSummary], below: Sequence[str]) -> str:
    """Returns a Markdown table with the lines `below` it."""
    return markdown_table(*shown(rows), below)


def markdown_table(titles: Sequence[str], cells: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    """Returns a Markdown table, with the first column aligned left, and the lines `below` it."""
    lines = [titles, ["---", *["--:"] * (len(titles) - 1)], *cells]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return "\n".join([table, "", *(f"- {line}" for line in below)]) + "\n"


def to_csv(rows: Sequence[TierSummary]) -> str:
    """Returns every field of every tier; a spread becomes NAME, NAME_low, NAME_high, NAME_count; missing is empty."""
    return csv_text([_flat(row) for row in rows])


def csv_text(records: Sequence[dict[str, Any]]) -> str:
    """Returns records with the same keys as CSV with a header."""
    file = io.StringIO()
    writer = csv.DictWriter(file, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def to_json(rows: Sequence[TierSummary], remarks: Sequence[str], verdict: Sequence[str]) -> str:
    """Returns the tiers with full precision, the verdict and the notes."""
    content = {"tiers": [dataclasses.asdict(row) for row in rows], "verdict": list(verdict), "notes": list(remarks)}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _flat(row: TierSummary) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.name == "missing":
            record["missing"] = "; ".join(f"{key}: {reason}" for key, reason in value.items())
        elif field.type == Spread | None:
            parts = dataclasses.asdict(value) if value else dict.fromkeys(("median", "low", "high", "count"))
            record |= {field.name if key == "median" else f"{field.name}_{key}": part for key, part in parts.items()}
        else:
            record[field.name] = value
    return record


def to_terminal(rows: Sequence[TierSummary], width: int | None = None) -> str:
    """Returns a table with a column for each tier: it stays narrow with any number of values."""
    from rich.console import Console
    from rich.table import Table

    titles, cells = shown(rows)
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False)
    table.add_column("")
    for row in rows:
        table.add_column(row.tier, justify="right")
    for index, title in enumerate(titles[1:], start=1):
        table.add_row(title, *(cell[index] for cell in cells))
    # Names and states come from folders and files: what looks like markup in them is text.
    console = Console(width=width or max(80, 26 + 26 * len(rows)), markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
