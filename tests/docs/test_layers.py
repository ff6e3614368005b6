"""Tests the layout that CONTRIBUTING promises: imports run downwards only, and no two modules share a name."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.__main__ import VERBS
from docs.rooms import ENTRY, arrows, imports, levels, modules, room_of, sources
from tests.docs.sources import ROOT


def upward(package: str, sources: Mapping[str, str]) -> list[str]:
    """`module imports other` for each import that does not lead to a lower line of the chain."""
    rooms = levels(package)
    return sorted(
        f"{module} imports {other}"
        for module, source in sources.items()
        for other in imports(source)
        if other.startswith(f"{package}.") and (there := room_of(other)) != (here := room_of(module))
        if rooms.get(there, -1) <= rooms[here]
    )


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_imports_lead_down_one_chain_of_rooms(package: str) -> None:
    assert {room_of(module) for module in sources(package)} == levels(package).keys()
    assert upward(package, sources(package)) == []
    assert imports((ROOT / package / "__init__.py").read_text(encoding="utf-8")) == set()


def test_an_upward_import_is_found() -> None:
    planted = {
        "trainer.data.order": "def f():\n    from trainer.models import mlp", "trainer.run.job": "import trainer.task",
        "trainer.models.x": "from trainer.reporting import y\nfrom trainer.base.errors import z",
        "trainer.base.storage.x": "from trainer.base.settings import y\nfrom trainer import errors",
    }  # fmt: skip
    assert upward("trainer", planted) == [
        "trainer.base.storage.x imports trainer.base.settings", "trainer.base.storage.x imports trainer.errors",
        "trainer.data.order imports trainer.models", "trainer.models.x imports trainer.reporting",
        "trainer.run.job imports trainer.task",
    ]  # fmt: skip


def test_trainer_has_few_rooms_and_arrows() -> None:
    assert len(levels("trainer")) <= 16
    assert len(arrows("trainer")) <= 95


def test_the_top_of_trainer_holds_what_users_type() -> None:
    names = {path.stem for path in (ROOT / "trainer").glob("*.py")}
    assert names == {"__init__", *ENTRY}


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    named = dict(modules(package))
    edges = {module: imports(source) & named.keys() - {module} for module, source in named.items()}
    edges = {module: {o for o in others if not module.startswith(f"{o}.")} for module, others in edges.items()}
    while leaves := [module for module, others in edges.items() if not others & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert edges == {}


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_no_two_modules_of_a_package_share_a_name(package: str) -> None:
    paths = [path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*.py")]
    names = [path.stem for path in paths if path.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_verbs_are_modules_of_cli_and_of_nothing_else() -> None:
    assert [verb for verb in VERBS if not (ROOT / "deploy" / "cli" / f"{verb}.py").is_file()] == []
    others = [path for path in (ROOT / "deploy").rglob("*.py") if path.parent.name != "cli" and path.stem in VERBS]
    assert others == []


def test_deploy_uses_of_trainer_what_needs_no_tensorflow() -> None:
    used = {other for _, source in modules("deploy") for other in imports(source) if other.split(".")[0] == "trainer"}
    assert {other for other in used if not other.startswith("trainer.base")} <= {"trainer"}  # its version
    base = "\n".join(source for name, source in modules("trainer") if name.startswith("trainer.base"))
    assert re.findall(r"^\s*(?:from|import) (?:tensorflow|keras)\b.*", base, re.MULTILINE) == []


def test_vertex_trainer_is_on_top_and_names_what_others_do() -> None:
    below = [source for package in ("trainer", "deploy") for _, source in modules(package)]
    assert [source for source in below if re.search(r"^\s*(from|import) vertex_trainer\b", source, re.MULTILINE)] == []
    names = ["__dir__", "__getattr__"]
    tree = ast.parse((ROOT / "vertex_trainer" / "__init__.py").read_text(encoding="utf-8"))
    assert [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))] == names
    assert [path.name for path in (ROOT / "vertex_trainer").glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_each_room_says_what_it_is_for(package: str) -> None:
    for path in (ROOT / package).glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
    assert Path(ROOT / package / "__init__.py").is_file()


@pytest.mark.slow  # it traces three whole commands
def test_the_page_holds_the_walks_as_they_are() -> None:
    command = [sys.executable, "-m", "docs.walks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert done.stdout in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
