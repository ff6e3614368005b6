"""Prints and writes a report: table, verdict and one self-contained report.html."""

import base64
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from string import Template

from deploy.base.console import say
from deploy.report.collection import Collection, collect
from deploy.report.measures import TierSummary, summarize
from deploy.report.plots import draw
from deploy.report.table import notes, shown, to_csv, to_json, to_markdown, to_terminal
from deploy.report.verdict import verdict
from trainer.base.run_files.job_files import mapping, step_of
from trainer.base.storage import local_path, make_writable, write_whole


def write_report(
    folders: Sequence[str], out: str, baseline: str = "", usd_by_tier: Mapping[str, float] | None = None
) -> None:
    """Writes table.md, table.csv, table.json and report.html into `out`, and prints the table and the verdict.

    `baseline`: the tier that speed-ups relate to, by default the first; `usd_by_tier`: prices of an hour of all
    machines. report.html is written last, so that a UserError for a missing matplotlib comes after the tables. Nothing
    is printed before all files are written, because a closed pipe ends the program.
    """
    collection = collect(folders)
    rows = summarize(collection, baseline, usd_by_tier)
    sentences, remarks = verdict(collection, rows, baseline), [*notes(rows, collection)]
    target = local_path(out, "out")
    make_writable(target, "out")
    write_whole(target / "table.md", to_markdown(rows, [*sentences, *remarks]))
    write_whole(target / "table.csv", to_csv(rows))
    write_whole(target / "table.json", to_json(rows, remarks, sentences))
    try:
        write_whole(target / "report.html", to_html(collection, rows, sentences, remarks))
    finally:
        say(to_terminal(rows), *sentences, "", *remarks)
    say(f"\n{target / 'report.html'}")


def to_html(
    collection: Collection, rows: Sequence[TierSummary], sentences: Sequence[str], remarks: Sequence[str]
) -> str:
    """Returns the report as one HTML page that needs no other file. Raises UserError if matplotlib is missing."""
    runs = collection.runs
    configs = [run.config for run in runs if run.config]
    subjects = {str(config.get("recipe") or config.get("script") or config.get("model")) for config in configs}
    subject = Path(subjects.pop()).stem if len(subjects) == 1 else "Training"
    tensorflow = {str(mapping(run.info, "versions").get("tensorflow", "")) for run in runs} - {""}
    about = (
        f"{len(collection.tiers)} tiers, {len(runs)} runs",
        min((str(run.info.get("started", "")) for run in runs), default="")[:10],
        f"TensorFlow {', '.join(sorted(tensorflow))}" if tensorflow else "",
        f"{collection.scaling} scaling" if collection.scaling else "",
    )
    tiers_by_command: dict[str, list[str]] = {}  # the command of the comparison, or that of the tier's first run
    for tier in collection.tiers:
        command = tier.command or next((str(run.info.get("command", "")) for run in tier.runs), "")
        tiers_by_command.setdefault(command, []).append(tier.name)
    samples = []
    for tier in collection.tiers:
        if tier.runs and (picture := tier.runs[0].sample):
            data = base64.b64encode(picture.read_bytes()).decode()
            image = f'<img alt="samples of {html.escape(tier.name)}" src="data:image/png;base64,{data}">'
            samples.append(_figure(tier.name, f"step {step_of(picture.stem)}", image))
    drawn = draw(collection, rows)
    (_, *names), *lines = [[html.escape(cell) for cell in line] for line in shown(rows)]
    cells = [(title, "".join(f"<td>{cell}</td>" for cell in values)) for title, *values in lines]
    measures = "\n".join(f'<tr><th scope="row">{title}</th>{values}</tr>' for title, values in cells)
    page, style = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.html", "page.css"))
    return Template(page).substitute(
        style=style,
        title=html.escape(f"{subject}: {' · '.join(row.tier for row in rows)}"),
        about=html.escape(" · ".join(filter(None, about))),
        answer=html.escape(sentences[0]),
        picture="".join(starmap(_figure, drawn[:1])),
        verdict=_items(sentences[1:]),
        tiers="".join(f'<th scope="col">{name}</th>' for name in names),
        # The quartiles or the interval, in brackets, are shown below the middle.
        measures=re.sub(r" (\([^<]*)</td>", r"<span>\1</span></td>", measures),
        notes=_items(remarks),
        figures=_section("Figures", starmap(_figure, drawn[1:]), "figures"),
        samples=_section("Samples from the same noise", samples, "figures samples"),
        commands="\n".join(
            f"<details><summary>{html.escape(', '.join(tiers))}</summary><pre>{html.escape(command)}</pre></details>"
            for command, tiers in tiers_by_command.items()
            if command
        ),
    )


def _items(lines: Iterable[str]) -> str:
    return "\n".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _section(title: str, drawn: Iterable[str], classes: str) -> str:
    """Returns a heading with the HTML figures `drawn` below it; "" without figures."""
    figures = "\n".join(drawn)
    return f'<h2>{title}</h2>\n<div class="{classes}">\n{figures}\n</div>' if figures else ""


def _figure(title: str, caption: str, content: str = "") -> str:
    """Returns an HTML figure; `content` is HTML, the others are text."""
    title, caption = html.escape(title), html.escape(caption)
    return f"<figure><h3>{title}</h3><figcaption>{caption}</figcaption>{content}</figure>"
