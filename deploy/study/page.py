"""Writes the results of a study: tables, and one self-contained tune.html with Optuna's figures."""

import base64
import html
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from deploy.report.html_page import TEMPLATE, figure, html_table, items, page, section
from deploy.report.table import csv_text, markdown_table
from deploy.study.optuna_study import in_memory
from deploy.study.outcome import StudyOutcome
from trainer.base.errors import UserError
from trainer.base.storage import make_writable, write_whole

PAGE = "tune.html"


def write_outcome(outcome: StudyOutcome, out: Path, title: str) -> None:
    """Writes table.md, table.csv, table.json and tune.html into `out`, and prints the table and the verdict.

    tune.html comes last: if matplotlib is missing, UserError is raised after the tables.
    """
    make_writable(out, "out")
    records, verdict, notes, command = outcome.records(), outcome.verdict(), outcome.notes(), outcome.best_command
    below = [*verdict, *([f"`{command}`"] if command else []), *notes]
    write_whole(out / "table.md", markdown_table(*outcome.rows(), below))
    flat = [{key: value for key, value in record.items() if not isinstance(value, list)} for record in records]
    write_whole(out / "table.csv", csv_text(flat))
    content = {
        "metric": outcome.plan.metric,
        "goal": outcome.plan.goal,
        "trials": records,
        "best": outcome.complete[0].number + 1 if outcome.complete else None,
        "best_command": command,
        "verdict": verdict,
        "notes": notes,
    }
    write_whole(out / "table.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    try:
        write_whole(out / PAGE, to_html(outcome, title))
    finally:
        print("\n".join([*_aligned(*outcome.rows()), "", *verdict, "", *notes, *(["", command] if command else [])]))
    print(f"\n{out / PAGE}")


def _aligned(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table for the terminal; its last column may be long."""
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    for line in (titles, *cells):
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def to_html(outcome: StudyOutcome, title: str) -> str:
    """Returns one HTML page that needs no other file. Raises UserError if matplotlib is not installed."""
    commands = {"The best trial": outcome.best_command, "The study": outcome.plan.command}
    return page(
        TEMPLATE,
        title=html.escape(title),
        about=html.escape(f"{len(outcome.trials)} trials by {outcome.plan.metric} ({outcome.plan.goal})"),
        simulated="",
        verdict=items(outcome.verdict()),
        table=html_table(*outcome.rows()),
        notes=items(outcome.notes()),
        figures=section("Figures", _figures(outcome) if outcome.complete else ()),
        samples="",
        commands="\n".join(
            f"<details open><summary>{name}</summary><pre>{html.escape(text)}</pre></details>"
            for name, text in commands.items()
            if text
        ),
    )


def _figures(outcome: StudyOutcome) -> Iterator[str]:
    """Yields Optuna's figures as HTML."""
    try:
        import matplotlib.pyplot as plt
        from optuna.visualization import matplotlib as plots
    except ImportError:
        raise UserError("the page of a study needs matplotlib for its figures: pip install matplotlib") from None
    study, metric = in_memory(outcome.plan.goal, outcome.trials), outcome.plan.metric
    drawings = {
        "trial": ("complete trials and the best so far", partial(plots.plot_optimization_history, target_name=metric)),
        "setting": ("complete trials; later ones are darker", partial(plots.plot_slice, target_name=metric)),
        "report": ("of every trial; reports count from 0", plots.plot_intermediate_values),
    }
    plt.switch_backend("svg")
    for name, (caption, draw) in drawings.items():
        title, file = f"{metric} by {name}", io.BytesIO()
        with plt.rc_context(), warnings.catch_warnings():  # Optuna sets pyplot's style, and calls this experimental
            warnings.simplefilter("ignore")
            draw(study)
            plt.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
            plt.close("all")
        picture = base64.b64encode(file.getvalue()).decode()
        yield figure(title, caption, f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{picture}">')
