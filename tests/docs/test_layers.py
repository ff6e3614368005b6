"""Tests that imports run downwards only, and never in a circle."""

import re
from collections.abc import Mapping

import pytest

from docs.rooms import imports, levels, modules, room_of, sources
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


@pytest.mark.parametrize("package", ["trainer", "deploy"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    named = dict(modules(package))
    edges = {module: imports(source) & named.keys() - {module} for module, source in named.items()}
    edges = {module: {o for o in others if not module.startswith(f"{o}.")} for module, others in edges.items()}
    while leaves := [module for module, others in edges.items() if not others & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert edges == {}


def test_deploy_uses_of_trainer_what_needs_no_tensorflow() -> None:
    used = {other for _, source in modules("deploy") for other in imports(source) if other.split(".")[0] == "trainer"}
    assert {other for other in used if not other.startswith("trainer.base")} <= {"trainer"}  # its version
    base = "\n".join(source for name, source in modules("trainer") if name.startswith("trainer.base"))
    assert re.findall(r"^\s*(?:from|import) (?:tensorflow|keras)\b.*", base, re.MULTILINE) == []


def test_vertex_trainer_is_on_top() -> None:
    below = [source for package in ("trainer", "deploy") for _, source in modules(package)]
    assert [source for source in below if re.search(r"^\s*(from|import) vertex_trainer\b", source, re.MULTILINE)] == []
