"""Tests sizes, docstrings, pages and the developer's tools."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

import trainer
from tests import versions
from tests.docs.sources import ROOT

MOST_LINES, MOST_FUNCTION_LINES = 450, 80
FOLDERS = ("trainer", "deploy", "benchmarks", "examples", "tests", "docs")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def too_long(source: str) -> list[str]:
    """Returns what is too long: functions by name, and the file as `file`."""
    file = ["file"] if source.count("\n") > MOST_LINES else []
    lengths = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions(source)]
    return file + [name for name, lines in lengths if lines > MOST_FUNCTION_LINES]


def test_no_file_and_no_function_is_too_long() -> None:
    found = {str(path.relative_to(ROOT)): too_long(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: names for name, names in found.items() if names} == {}
    assert len(FILES) > 150


def public(source: str) -> Iterator[tuple[str, bool]]:
    """Yields public functions, classes and methods (`.name`), and whether each has a docstring."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node) is not None
            methods = node.body if isinstance(node, ast.ClassDef) else []
            for method in methods:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield f".{method.name}", ast.get_docstring(method) is not None


def undocumented(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns names by module. A method that implements a protocol or overrides another is documented there."""
    found = {path: list(public(source)) for path, source in sources.items()}
    inherited = {name for names in found.values() for name, documented in names if documented and name.startswith(".")}
    left = {path: [name for name, own in names if not own and name not in inherited] for path, names in found.items()}
    return {path: names for path, names in left.items() if names}


def test_what_is_public_is_documented() -> None:
    paths = [path for path in FILES if path.relative_to(ROOT).parts[0] in FOLDERS[:4]]
    assert undocumented({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}) == {}


# Nouns and pronouns that look like verbs in the third person.
NOUNS = (
    "Accelerators|Arrays|Class|Commands|Connections|Contenders|Convolutions|Epochs|Examples|Features|Fields|Files|Flags|"
    "Hours|Images|Indices|Its|Jobs|Keras|Labels|Layers|Lines|Losses|Machines|Networks|Numbers|Objects|Ours|Replicas|"
    "Permutations|Rows|Scalars|Seconds|Settings|Sources|This|Tiers|Titles|Workers"
)


def without_verb(source: str) -> list[tuple[int, str]]:
    """Returns line and first word of each docstring that does not begin with a verb in the third person.

    A command may stand before the verb.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Module, ast.ClassDef, Function))]
    texts = [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node)) is not None]
    verb = re.compile(rf"(?!(?:{NOUNS})\b)[A-Z][a-z]+s\b")
    texts = [(line, re.sub(r"\Apython -m .*?\n\n", "", text, flags=re.DOTALL)) for line, text in texts]
    return sorted((line, text.partition(" ")[0]) for line, text in texts if not verb.match(text))


def test_every_docstring_begins_with_a_verb() -> None:
    found = [
        f"{name}:{line} {word}"
        for path in FILES
        if not (name := path.relative_to(ROOT).as_posix()).startswith("tests/")
        for line, word in without_verb(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_pre_commit_runs_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]  # so nothing is downloaded
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe
    assert entries == [line.strip().removeprefix("$(VENV)/bin/") for line in recipe[1].splitlines()]
    assert all(hook["language"] == "system" for hook in hooks[0]["hooks"])


def test_decisions_are_one_page_each() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert len(pages) >= 7
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.count("\n") <= 40
        assert f"({page.name})" in index
        for part in ("**Context.**", "**Decision.**", "**Consequences.**", "**What would change our mind.**"):
            assert part in text


def links(page: Path) -> Iterator[str]:
    """Yields the targets of Markdown links to files of the tree."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            yield target


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [(page, target) for page in pages for target in links(page)]
    assert [f"{page.name}: {target}" for page, target in found if not (page.parent / target).exists()] == []


def test_what_runs_on_other_versions_exists() -> None:
    for place in (*versions.ON_EVERY_PYTHON, *versions.ON_THE_FLOOR):
        file, _, name = place.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("codes", "whole"), [([0, 0], 0), ([0, 1], 1), ([0, -9], 1), ([5, 0], 1)])
def test_the_versions_pass_only_if_all_do(codes: list[int], whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code -9 means that pytest was killed."""
    monkeypatch.setattr(versions, "run", lambda version: codes[version == "3.12"])
    assert versions.main(["3.10", "3.12"]) == whole


def test_the_version_is_the_same_wherever_it_stands() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == trainer.__version__
    assert f"Version {trainer.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tests", "weekly"])
def test_a_workflow_runs_what_ci_runs(name: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    assert command == ".ci/run" or set(command.split()) - {"make"} <= set((ROOT / ".ci/run").read_text().split())
