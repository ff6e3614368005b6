"""Prints and writes a report: the verdict, pictures, tables and one self-contained report.html."""

import base64
import html
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from deploy.base.console import say
from deploy.report import plots
from deploy.report.collection import Collection, collect
from deploy.report.formatting import grouped, html_rows
from deploy.report.measures import Rows, loss_curve, summarize
from deploy.report.table import notes, table_lines, to_json, to_markdown, to_terminal
from deploy.report.verdict import verdict
from trainer.base.run_files.job_files import step_of
from trainer.base.storage import local_path, make_writable, write_whole


def write_report(
    folders: Sequence[str],
    out: str,
    baseline: str = "",
    usd_by_tier: Mapping[str, float] | None = None,
) -> None:
    """Writes table.md and .json, time_and_money.png and report.html into `out`; prints the verdict
    and a table.

    `baseline`: the tier that speed-ups relate to, by default the first; `usd_by_tier`: prices of an
        hour of all machines. The pictures come last, so that a UserError for a missing matplotlib
        comes after the tables. Nothing is printed before all files are written, because a closed
        pipe ends the program.
    """
    collection = collect(folders)
    rows = summarize(collection, baseline, usd_by_tier)
    sentences = verdict(collection, rows)
    remarks = [*notes(rows, collection)]
    target = local_path(out, "out")
    make_writable(target, "out")
    write_whole(target / "table.md", to_markdown(rows, [*sentences, *remarks]))
    write_whole(target / "table.json", to_json(rows, remarks, sentences))
    try:
        if plots.measured(rows):
            plot = partial(plots.time_and_money, rows=rows)
            write_whole(target / "time_and_money.png", plots.picture(plot, 9, "png"))
        write_whole(target / "report.html", to_html(collection, rows, sentences, remarks))
    finally:
        say(*sentences, "", to_terminal(rows), *remarks[:2])
    say(f"\n{target / 'report.html'}")


def to_html(
    collection: Collection, rows: Rows, sentences: Sequence[str], remarks: Sequence[str]
) -> str:
    """Returns the report as one HTML page that needs no other file.

    Raises UserError if matplotlib is missing.
    """
    # Its title, the pictures, a sample of each tier, and the commands.
    runs = collection.runs
    subjects = set[str]()
    for config in (run.config for run in runs if run.config):
        subjects.add(str(config.get("recipe") or config.get("script") or config.get("model")))
    subject = Path(subjects.pop()).stem if len(subjects) == 1 else "Training"
    started = min((str(run.info.get("started", "")) for run in runs), default="")[:10]
    pictures = []
    if plots.measured(rows):
        plot = partial(plots.time_and_money, rows=rows)
        pictures.append(
            _picture(
                "Time and money", "bars: medians of the repeats; whiskers: lowest to highest", plot
            )
        )
    if any(loss_curve(run)[1] for run in runs):
        plot = partial(plots.losses, groups=collection.tiers)
        pictures.append(
            _picture(
                "Loss", "of the first repeat of each tier; equal curves cover each other", plot
            )
        )
    samples = []
    commands = []  # that of the comparison, or of the tier's first run
    for tier in collection.tiers:
        command = tier.command or next((str(run.info.get("command", "")) for run in tier.runs), "")
        commands.append((command, tier.name))
        if tier.runs and (file := tier.runs[0].sample):
            source = _data(file.read_bytes(), "png")
            image = f'<img alt="samples of {html.escape(tier.name)}" src="{source}">'
            samples.append(_figure(tier.name, f"step {step_of(file.stem)}", image))
    details = []
    for command, tiers in grouped(commands).items():
        if command:
            details.append(f"<p>{html.escape(tiers)}</p><pre>{html.escape(command)}</pre>")
    folder = Path(__file__).parent
    page = (folder / "report.html").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    return Template(page).substitute(
        style=style,
        title=html.escape(f"{subject}: {' · '.join(row.tier for row in rows)}"),
        about=html.escape(f"{len(rows)} tiers, {len(runs)} runs, {started}"),
        answer=_text(sentences[0]),
        pictures="\n".join(pictures),
        verdict=_items(sentences[1:]),
        first=html_rows(*table_lines(rows, first=True)),
        measures=html_rows(*table_lines(rows)),
        notes=_items(remarks),
        samples="\n".join(samples),
        commands="\n".join(details),
    )


def _items(lines: Iterable[str]) -> str:
    return "\n".join(f"<li>{_text(line)}</li>" for line in lines)


def _text(line: str) -> str:
    """Returns a sentence as HTML in which no unit stands at the beginning of a line."""
    return re.sub(r"(\d) (?=(x|min|h)\b|%)", "\\1&nbsp;", html.escape(line))


def _data(content: bytes, form: str) -> str:
    return f"data:image/{form};base64,{base64.b64encode(content).decode()}"


def _picture(title: str, caption: str, plot: Any) -> str:
    """Returns an HTML figure with a plot for wide and narrow screens, each light and dark."""
    sources = ""
    screens = (("(max-width: 40rem)", 3.6), ("(min-width: 40.01rem)", 10))
    for scheme, (screen, width) in itertools.product(("dark", "light"), screens):
        image = _data(plots.picture(plot, width, dark=scheme == "dark"), "svg+xml")
        media = f"screen and (prefers-color-scheme: {scheme}) and {screen}"
        sources += f'<source media="{media}" srcset="{image}">'
    # the last one, light and wide, is also that of a printed page
    content = f'<picture>{sources}<img alt="{title}" src="{image}"></picture>'
    return _figure(title, caption, content)


def _figure(title: str, caption: str, content: str) -> str:
    """Returns an HTML figure; `content` is HTML, the others are text."""
    title = html.escape(title)
    caption = html.escape(caption)
    return f"<figure><h3>{title}</h3><figcaption>{caption}</figcaption>{content}</figure>"
