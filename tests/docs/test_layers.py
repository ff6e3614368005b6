"""Tests that imports run downwards only, and never in a circle."""

import ast
import re

import pytest

from docs.rooms import arrows, imports, levels, modules, room_of, sources
from tests.docs.sources import ROOT


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_imports_lead_down_one_chain_of_rooms(package: str) -> None:
    rooms = levels(package)
    pairs = arrows(package)
    assert {room_of(module) for module in sources(package)} == rooms.keys()
    assert len(pairs) > 20
    assert [pair for pair in pairs if rooms.get(pair[1], -1) <= rooms[pair[0]]] == []
    # trainer/__init__.py itself looks for the environment's packages, before deploy needs one
    assert imports((ROOT / package / "__init__.py").read_text(encoding="utf-8")) <= {"trainer"}


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    named = dict(modules(package))
    edges = {module: imports(source) & named.keys() - {module} for module, source in named.items()}
    edges = {
        module: {o for o in others if not module.startswith(f"{o}.")}
        for module, others in edges.items()
    }
    while leaves := [module for module, others in edges.items() if not others & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert edges == {}


def test_deploy_uses_of_trainer_what_needs_no_tensorflow() -> None:
    used = {
        other
        for name, source in modules("deploy")
        for other in imports(source)
        # that module runs alone, in the process of a script
        if other.split(".")[0] == "trainer" and name != "deploy.packaging.first_fit"
    }
    # its version
    assert {other for other in used if not other.startswith("trainer.base")} <= {"trainer"}
    base = "\n".join(
        source for name, source in modules("trainer") if name.startswith("trainer.base")
    )
    assert re.findall(r"^\s*(?:from|import) (?:tensorflow|keras)\b.*", base, re.MULTILINE) == []


def test_vertex_trainer_is_on_top() -> None:
    below = [source for package in ("trainer", "deploy") for _, source in modules(package)]
    assert [
        source
        for source in below
        if re.search(r"^\s*(from|import) vertex_trainer\b", source, re.MULTILINE)
    ] == []


def test_no_public_name_has_two_definitions() -> None:
    """A reader who meets a function or a class finds one of this name; each command has its own
    `main`."""
    places = {}
    for package in ("trainer", "deploy", "vertex_trainer"):
        for module, source in modules(package):
            for node in ast.parse(source).body:
                if (
                    isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                    and node.name[0] != "_"
                ):
                    places.setdefault(node.name, []).append(module)
    assert {
        name: found for name, found in places.items() if len(found) > 1 and name != "main"
    } == {}


def test_a_module_that_is_imported_by_a_text_counts() -> None:
    source = """
NAME = "trainer.models.gan"
import_module(NAME)
importlib.import_module("deploy.job")
import_module(path)
"""
    assert imports(source) == {"trainer.models.gan", "deploy.job"}
