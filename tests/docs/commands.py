"""Reads the commands that README, docs and examples show, as argument lists, each with its page."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.sources import ROOT

BEGINNINGS = ("python -m ", "make ", "pip ", "gcloud ", "pre-commit ")


@dataclass(frozen=True)
class Command:
    """Holds a command as `words`, split as a shell does, without comments and what follows > or
    |."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"

    @property
    def subject(self) -> str:
        """Returns what a rule is chosen by: `trainer.task`, `deploy submit` or `make`."""
        if self.words[:2] == ("python", "-m"):
            return " ".join(self.words[2:4]) if self.words[2] == "deploy" else self.words[2]
        return self.words[0]

    @property
    def arguments(self) -> list[str]:
        """Returns the words after the subject."""
        skipped = {"deploy": 4}.get(self.words[2], 3) if self.words[0] == "python" else 1
        return list(self.words[skipped:])


def documented() -> list[Command]:
    """Returns every command of the pages and examples once, with the first page that has it."""
    pages = [
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    pages += [ROOT / "examples" / "README.md"]
    pages += [
        page for folder in ("docs", "examples") for page in sorted((ROOT / folder).rglob("*.py"))
    ]
    pages += sorted((ROOT / "docs").glob("*.ipynb"))
    found = [command for page in pages for command in commands(page)]
    return list({command.words: command for command in reversed(found)}.values())[::-1]


def commands(page: Path) -> Iterator[Command]:
    """Yields the commands in fenced blocks and in inline code.

    Of Python files the module docstring is read, of notebooks the text and the cells that begin
    with !.
    """
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    if page.suffix == ".py":
        text = f"```\n{text.split(chr(34) * 3)[1]}\n```"
    if page.suffix == ".ipynb":
        text = "\n".join(map(markdown, json.loads(text)["cells"]))
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in fenced:
        for line in block.replace("\\\n", " ").splitlines():
            yield from parsed(name, line.strip().removeprefix("$ "))
    # without the keys of entries
    prose = re.sub(r"^```.*?^```|^- `[^\n]*`$", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        if "…" not in code and "VERB" not in code:  # a pattern, not a command
            yield from parsed(name, code)


def markdown(cell: Mapping[str, Any]) -> str:
    """Returns a cell of a notebook: commands of the shell as a fenced block, text as it is, Python
    left out."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "code":
        return f"```\n{source[1:]}\n```" if source.startswith("!") else ""
    return source


def parsed(place: str, line: str) -> Iterator[Command]:
    """Yields the line as a command if it begins like one."""
    if line.startswith(BEGINNINGS):
        words = shlex.split(line, comments=True)
        ends = (words.index(sign) for sign in (">", "|") if sign in words)
        yield Command(place, tuple(words[: min(ends, default=None)]))
