"""Tests that the keys of docs/troubleshooting.md are exactly the lines that the program prints."""

import re

from tests.docs.sources import ROOT, one_line, texts

PAGE = ROOT / "docs" / "troubleshooting.md"


def keys(page: str) -> list[str]:
    """Returns the code at the head of each entry."""
    return [one_line(found[1].strip("`")) for found in re.finditer(r"^- (`.*`)$", page, re.MULTILINE)]


def plain(line: str) -> str:
    """Returns the line without backticks, which both Markdown and the program use."""
    return line.replace("`", "")


def test_every_key_is_a_line_of_the_program() -> None:
    known = {plain(text) for text in texts()}
    found = keys(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 50
    unknown = [key for key in found if plain(key).strip() not in known]
    assert unknown == [], "these keys match no string of trainer/ or deploy/"
    assert len(set(found)) == len(found)


def test_every_entry_has_an_explanation() -> None:
    entries = re.split(r"^- `", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for entry in entries:
        _, _, rest = entry.partition("\n")
        assert len(rest.split("\n## ")[0].split()) >= 8, entry
