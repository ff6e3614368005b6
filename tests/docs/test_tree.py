"""Tests that links lead somewhere, and that the developer's tools run what they say."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

import trainer
from deploy.packaging.distributions import ADMITTED
from tests import versions
from tests.docs.sources import ROOT
from trainer.invariance.internals import TRIED


def links(page: Path) -> Iterator[str]:
    """Yields the targets of Markdown links to files of the tree."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            yield target


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [(page, target) for page in pages for target in links(page)]
    assert [
        f"{page.name}: {target}" for page, target in found if not (page.parent / target).exists()
    ] == []


def test_what_runs_on_other_versions_exists() -> None:
    for place in (*versions.ON_EVERY_PYTHON, *versions.ON_THE_FLOOR, versions.WORKERS):
        file, _, name = place.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / file).read_text(
            encoding="utf-8"
        )


def test_the_floor_is_the_same_wherever_it_stands() -> None:
    """setup.py says which versions are admitted; the rest of them follows from there, or is
    compared here."""
    lowest, cap = re.findall(r"[\d.]+", ADMITTED["tensorflow"])
    newest = f"2.{int(cap.removeprefix('2.')) - 1}"
    assert (
        f"TensorFlow {lowest} or {newest} with Keras {ADMITTED['keras'].split(',')[0].lstrip('>=')}"
        == TRIED
    )
    assert versions.TENSORFLOW[versions.FLOOR] == f"tensorflow=={lowest}.*"
    for file, line in {
        "setup.py": 'python_requires=">={}"',
        "pyproject.toml": 'python_version = "{}"',
        "Makefile": "older than {}:",
        "README.md": "You need Python {} or newer",
        ".github/workflows/weekly.yml": " {}\n",
    }.items():
        assert line.format(versions.FLOOR) in (ROOT / file).read_text(encoding="utf-8")


def test_the_version_is_the_same_wherever_it_stands() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == trainer.__version__
    assert f"Version {trainer.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
