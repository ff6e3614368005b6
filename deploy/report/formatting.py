"""Formats numbers, and tables of texts as Markdown and for the terminal."""

import html
from collections.abc import Iterable, Sequence


def figures(value: float, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits, and thousands with commas: 12,300; 8.10;
    0.00786."""
    if value == 0:
        return "0"
    rounded = f"{value:.{digits - 1}e}"
    exponent = int(rounded.partition("e")[2])
    return f"{float(rounded):,.{max(0, digits - 1 - exponent)}f}"


def money(value: float) -> str:
    """Formats USD with their sign: `$12.30`."""
    return f"${dollars(value)}"


def dollars(value: float) -> str:
    """Formats USD without their sign, for a column or a line that names them: `1,234`, `12.30`,
    `0.004`."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.01 else figures(value, 1)


def span(hours: float) -> str:
    """Formats a time as people say it: `45 s`, `7 min`, `3.5 h`, `5 days`."""
    unit, of_unit = unit_of_time(hours)
    return f"{brief(hours / of_unit)} {unit}"


def unit_of_time(hours: float) -> tuple[str, float]:
    """Returns the unit in which people would say a time, and how many hours the unit has."""
    units = (("s", 1 / 3600, 59.5), ("min", 1 / 60, 100), ("h", 1.0, 100))
    return next(((name, unit) for name, unit, end in units if hours < end * unit), ("days", 24.0))


def brief(value: float) -> str:
    """Formats a number that a unit follows: `4.5`, `7`, `1,200`."""
    return f"{value:,.0f}" if value >= 5 or value == round(value) else f"{value:.1f}"


def percent(share: float) -> str:
    """Formats a share of 1: `41 %`."""
    return f"{100 * share:.0f} %"


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns for each first text all second ones with commas, as the tiers of which a line is
    true, by that line."""
    lists: dict[str, dict[str, None]] = {}
    for key, name in pairs:
        lists.setdefault(key, {})[name] = None
    return {key: ", ".join(names) for key, names in lists.items()}


def markdown_table(
    titles: Sequence[str], cells: Sequence[Sequence[str]], below: Sequence[str], left: int = 1
) -> str:
    """Returns a Markdown table whose first `left` columns are aligned left, with the list `below`
    under it."""
    lines = []
    for row in (titles, ["---"] * left + ["--:"] * (len(titles) - left), *cells):
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in below)]) + "\n"


def html_table(
    titles: Sequence[str], lines: Sequence[Sequence[str]], below: Sequence[str] = ()
) -> str:
    """Returns a table as HTML for a notebook, with the lines `below` as paragraphs under it."""
    paragraphs = (f"<p>{html.escape(line)}</p>" for line in below)
    return f"<table>{html_rows(titles, *lines)}</table>{''.join(paragraphs)}"


def html_rows(*lines: Sequence[str]) -> str:
    """Returns the rows of a table whose first line and first column are titles."""
    head, *body = ([html.escape(cell) for cell in line] for line in lines)
    titles = "".join(f'<th scope="col">{name}</th>' for name in head)
    rows = []
    for title, *values in body:
        rows.append(f'<tr><th scope="row">{title}</th><td>{"</td><td>".join(values)}</td></tr>')
    return f"<thead><tr>{titles}</tr></thead>\n<tbody>{''.join(rows)}</tbody>"


def terminal_table(titles: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a table as plain text whose first `left` columns are aligned left."""
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
    aligned = [str.ljust] * left + [str.rjust] * (len(titles) - left)
    text = ""
    for line in (titles, *lines):
        columns = zip(aligned, line, widths, strict=True)
        cells = [align(cell, width) for align, cell, width in columns]
        text += "  ".join(cells).rstrip() + "\n"
    return text
