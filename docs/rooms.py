"""Draws the rooms of the two packages and their imports: `python -m docs.rooms` writes
docs/images/rooms.png.

An arrow leads from a room to one that it imports, unless a way through a third room leads there
too.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGE = Path(__file__).parent / "images" / "rooms.png"
# Modules that users type are one room, `entry`.
ENTRY = {"launch", "task", "check", "evaluate", "predict", "generate", "plan", "serve"}
# Rooms from the top: a module imports its own room and those of lower lines, never its neighbours
# of the same line.
CHAINS = {
    "trainer": (
        """
entry
checks, planning
run
measures
training
reporting, models
data
cluster
proof
invariance
user_code
base.run_files
base.settings
base.storage
base
"""
    ),
    "deploy": (
        """
__main__
cli
api
comparison
planning
job
platform, report
packaging
tiers
base
in_job
"""
    ),
}


def levels(package: str) -> dict[str, int]:
    """Returns the line of each room in its chain; the lowest room has the highest number."""
    return {
        room: at
        for at, line in enumerate(CHAINS[package].strip().splitlines())
        for room in line.split(", ")
    }


def modules(package: str) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, source) of each module; a package's __init__ has the name of the
    package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield (
            ".".join(parts[:-1] if parts[-1] == "__init__" else parts),
            path.read_text(encoding="utf-8"),
        )


def imports(source: str) -> set[str]:
    """Returns the modules of this project that a source imports anywhere; of `from trainer import
    x` trainer.x too.

    Those that import_module is called with count, as a text or as the name of a constant of the
    module.
    """
    names: set[str] = set()
    tree = ast.parse(source)
    texts = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
        ):
            name = node.args[0]
            text = (
                texts.get(name.id) if isinstance(name, ast.Name) else getattr(name, "value", None)
            )
            names |= {str(text)}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names if "." not in node.module),
            }
    return {name for name in names if name.split(".")[0] in CHAINS}


def room_of(module: str) -> str:
    """Returns the room of `package.room.module`; "" for the package itself."""
    package, first, second = [*module.split("."), "", ""][:3]
    if package == "trainer" and first in ENTRY:
        return "entry"
    return f"{first}.{second}" if f"{first}.{second}" in levels(package) else first


def sources(package: str) -> dict[str, str]:
    """Returns the source of each module but the package's own."""
    return {name: source for name, source in modules(package) if name != package}


def arrows(package: str) -> set[tuple[str, str]]:
    """Returns (room, room that it imports)."""
    pairs = {
        (room_of(module), room_of(other))
        for module, source in sources(package).items()
        for other in imports(source)
        if other.startswith(f"{package}.")
    }
    return {(room, other) for room, other in pairs if room != other}


def _direct(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Returns the pairs that no way through a third room replaces."""
    lower: dict[str, set[str]] = {
        room: {other for above, other in pairs if above == room} for room, _ in pairs
    }
    return {(a, b) for a, b in pairs if not any(b in lower.get(c, set()) for c in lower[a] - {b})}


def _draw(axes: Any, package: str, left: float) -> None:
    places = _places(package, left)
    lines: dict[str, int] = dict.fromkeys(places, 0)
    for module, source in sources(package).items():
        lines[room_of(module)] += source.count("\n")
    for room, other in _direct(arrows(package)):
        (x, y) = places[room]
        (to_x, to_y) = places[other]
        bend = 0.0 if abs(y - to_y) < 1.5 else 0.25
        style = f"arc3,rad={bend if x <= to_x else -bend}"
        axes.annotate(
            "",
            (to_x, to_y + 0.26),
            (x, y - 0.26),
            arrowprops={
                "arrowstyle": "-|>",
                "color": "#8a94a6",
                "connectionstyle": style,
                "lw": 0.9,
            },
        )
    box = {"boxstyle": "round,pad=0.35", "facecolor": "#eef3fb", "edgecolor": "#3b6fb6"}
    for room, (x, y) in places.items():
        axes.text(
            x, y, f"{room}  {lines[room]:,}", ha="center", va="center", fontsize=8.5, bbox=box
        )
    axes.text(left, 0.9, f"{package}/", ha="center", fontsize=11, weight="bold")


def _places(package: str, middle: float) -> Mapping[str, tuple[float, float]]:
    """Returns the centre of each room's box."""
    lines = [line.split(", ") for line in CHAINS[package].strip().splitlines()]
    return {
        room: (middle + (at - (len(line) - 1) / 2) * 2.2, -float(row))
        for row, line in enumerate(lines)
        for at, room in enumerate(line)
    }


def main() -> int:
    """Draws the picture; returns 0."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 7.4), layout="constrained")
    axes = figure.subplots()
    _draw(axes, "trainer", 0.0)
    _draw(axes, "deploy", 6.4)
    axes.annotate(
        "",
        (1.15, -10),
        (5.75, -9.1),
        arrowprops={
            "arrowstyle": "-|>",
            "color": "#8a94a6",
            "connectionstyle": "arc3,rad=-0.15",
            "lw": 0.9,
        },
    )
    axes.text(
        3.6,
        -10.8,
        "deploy imports of trainer\nbase alone",
        ha="center",
        fontsize=8,
        color="#555f70",
    )
    axes.text(6.4, -10.6, "the standard library alone", ha="center", fontsize=8, color="#555f70")
    axes.set_xlim(-2.6, 9.9)
    axes.set_ylim(-13.6, 1.4)
    axes.set_axis_off()
    figure.savefig(IMAGE, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
