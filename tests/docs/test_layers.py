"""Tests the layout that CONTRIBUTING promises: imports run downwards only, and no two modules share a name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.__main__ import VERBS
from tests.docs.sources import ROOT

# Room (a sub-package, or a module at a package's top) -> the rooms that it may import, lowest first.
_BASE = {"errors", "log", "terminal", "interface", "compat", "command"}
TRAINER: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "terminal": {"errors", "log"},
    "user_mistakes": {"errors"},
    "interface": {"errors"},
    "compat": {"errors", "log"},
    "command": {"errors", "log", "user_mistakes"},
    "storage": {"errors", "log", "terminal"},
    "config": {"errors", "log", "storage", "user_mistakes"},
    "distribution": {"errors", "log", "compat", "config"},
    "data": {*_BASE, "storage", "config", "distribution", "user_mistakes"},
    "models": {*_BASE, "storage", "config", "distribution", "data", "user_mistakes"},
    "reporting": {*_BASE, "storage", "config", "distribution", "data"},
    "training": {*_BASE, "storage", "config", "distribution", "data", "reporting", "user_mistakes"},
    "export": {*_BASE, "storage", "config", "data", "models", "user_mistakes"},
    "build": {*_BASE, "config", "distribution", "data", "models", "training"},
    "rehearsal": {*_BASE, "config", "data", "training", "export", "build", "user_mistakes"},
    "training_run": {*_BASE, "config", "distribution", "data", "reporting", "training", "build", "rehearsal"},
    "requested_run": {*_BASE, "storage", "config", "reporting"},
    "saved_run": {*_BASE, "storage", "config", "distribution", "data", "models", "reporting", "training", "export",
                  "build", "requested_run", "user_mistakes"},
    "job": {*_BASE, "storage", "config", "distribution", "data", "models", "reporting", "training", "export", "build",
            "training_run", "user_mistakes"},
    "planning": {*_BASE, "config", "distribution", "data", "models", "reporting", "training", "build"},
    "plan": {*_BASE, "storage", "config", "reporting", "planning"},
    "gpu_check": {*_BASE, "config", "distribution", "data", "models", "reporting", "training", "build"},
    "check": {*_BASE, "storage", "config", "distribution", "data", "models", "reporting", "build", "gpu_check"},
    "generate": {*_BASE, "storage", "config", "data", "reporting"},
    "evaluate": {*_BASE, "storage", "config", "reporting", "requested_run", "saved_run"},
    "predict": {*_BASE, "storage", "config", "requested_run", "saved_run"},
    "task": {*_BASE, "storage", "config", "distribution", "reporting", "job"},
}  # fmt: skip
DEPLOY: dict[str, set[str]] = {
    "in_job": set(),
    "spec": set(),
    "localrun": {"spec"},
    "vertex": {"spec"},
    "report": {"spec"},
    "planning": {"spec", "report"},
    "comparison": {"spec", "localrun", "vertex", "report", "planning"},
    "study": {"spec", "localrun", "vertex", "report", "comparison"},
    "cli": {"spec", "localrun", "vertex", "report", "planning", "comparison", "study"},
    "__main__": {"cli"},
}
# What deploy may use of trainer: nothing that imports TensorFlow.
OF_TRAINER = {"trainer", "trainer.config", "trainer.errors", "trainer.reporting", "trainer.storage", "trainer.terminal"}


def modules(package: str) -> Iterator[tuple[str, str]]:
    """(dotted name, source) of each module; a package's __init__ has the name of the package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text(encoding="utf-8")


def imports(source: str) -> set[str]:
    """Modules of this project that a source imports anywhere; `from trainer import job` counts as trainer.job too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names if "." not in node.module)}
    return {name for name in found if name.split(".")[0] in ("trainer", "deploy")}


def upward(package: str, allowed: dict[str, set[str]], sources: dict[str, str]) -> list[str]:
    """`module imports other` for each import between rooms that the table does not allow."""
    found = []
    for module, source in sources.items():
        room = [*module.split("."), ""][1]
        for other in imports(source):
            there = other.split(".")[1] if other.startswith(f"{package}.") else ""
            if room and there in allowed and there != room and there not in allowed.get(room, set()):
                found.append(f"{module} imports {other}")
    return sorted(found)


@pytest.mark.parametrize(("package", "allowed"), [("trainer", TRAINER), ("deploy", DEPLOY)])
def test_rooms_import_downwards_only(package: str, allowed: dict[str, set[str]]) -> None:
    sources = dict(modules(package))
    rooms = {module.split(".")[1] for module in sources if "." in module}
    assert rooms == allowed.keys(), "each room stands in the table"
    assert upward(package, allowed, sources) == []
    assert imports(sources[package]) == set()
    order = list(allowed)
    assert [room for room in order if not allowed[room] <= {*order[: order.index(room)]}] == [], "no circle of rooms"


def test_an_upward_import_is_found() -> None:
    planted = {
        "trainer.data.idx": "def load():\n    from trainer.models import mlp\n", "trainer.job": "import trainer.build",
        "trainer.training.x": "def f():\n    from trainer import job, log\nfrom trainer.models.gan import x",
    }  # fmt: skip
    assert upward("trainer", TRAINER, planted) == [
        "trainer.data.idx imports trainer.models", "trainer.training.x imports trainer.job",
        "trainer.training.x imports trainer.models.gan",
    ]  # fmt: skip


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    sources = dict(modules(package))
    edges = {module: imports(source) & sources.keys() - {module} for module, source in sources.items()}
    edges = {module: {o for o in others if not module.startswith(f"{o}.")} for module, others in edges.items()}
    while leaves := [module for module, others in edges.items() if not others & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert edges == {}


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_no_two_modules_of_a_package_share_a_name(package: str) -> None:
    names = [path.stem for path in (ROOT / package).rglob("*.py") if not path.stem.startswith("__")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_verbs_are_modules_of_cli_and_of_nothing_else() -> None:
    assert [verb for verb in VERBS if not (ROOT / "deploy" / "cli" / f"{verb}.py").is_file()] == []
    others = [path for path in (ROOT / "deploy").rglob("*.py") if path.parent.name != "cli" and path.stem in VERBS]
    assert others == []


def test_deploy_uses_of_trainer_what_needs_no_tensorflow() -> None:
    used = {other for _, source in modules("deploy") for other in imports(source) if other.split(".")[0] == "trainer"}
    assert {other for other in used if ".".join(other.split(".")[:2]) not in OF_TRAINER} == set()


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_each_room_says_what_it_is_for(package: str) -> None:
    for path in (ROOT / package).glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
    assert Path(ROOT / package / "__init__.py").is_file()
