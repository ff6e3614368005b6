"""The texts of the program: every string of its source, with … for what varies."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("trainer", "deploy")


@cache
def texts() -> frozenset[str]:
    """All strings of trainer/ and deploy/, each as one line; the holes of f-strings are …"""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return frozenset(text for path in files for text in strings(ast.parse(path.read_text(encoding="utf-8"))))


def strings(node: ast.AST) -> Iterator[str]:
    """Every string below `node`; neighbours without a sign between them are one to Python already."""
    if isinstance(node, ast.JoinedStr):
        yield one_line("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        children: list[ast.AST] = [part for part in node.values if not isinstance(part, ast.Constant)]
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield one_line(node.value)
    for child in children:
        yield from strings(child)


def one_line(text: str) -> str:
    """`text` with single blanks."""
    return " ".join(text.split())
