"""Collects the strings of the program's source, with … for the parts that vary."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("trainer", "deploy")


@cache
def texts() -> frozenset[str]:
    """Returns all strings of trainer/ and deploy/, each as one line; expressions in f-strings become …"""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return frozenset(text for path in files for text in strings(ast.parse(path.read_text(encoding="utf-8"))))


def strings(node: ast.AST) -> Iterator[str]:
    """Yields every string below `node`; Python has already joined adjacent literals."""
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
    """Returns `text` with single spaces."""
    return " ".join(text.split())
