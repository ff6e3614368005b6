"""Reads a user's script and the modules beside it as syntax trees: what they import, and whether
Keras's `fit` trains.

`trainer.launch` and `deploy` ask the same questions here, so that a job does what was said at the
desk. Nothing of the script is run.
"""

import ast
import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath


@dataclasses.dataclass(frozen=True)
class Import:
    """Holds one import statement.

    `module`: as written, with leading dots; `names`: the names after `import`.

    `certain`: whether it is always executed: it is at the top level of a module or of its `if
        __name__ == "__main__"`, not in a function, a `try` or another `if`. `optional`: whether the
        code goes on without it, by `except ImportError`.
    """

    file: str
    line: int
    module: str
    names: tuple[str, ...]
    certain: bool
    optional: bool

    @property
    def top(self) -> str:
        """Returns the name of the top-level package; empty for a relative import."""
        return self.module.partition(".")[0]

    def files(self) -> Iterator[str]:
        """Yields files below the searched folder that the import would execute if they exist."""
        dots = len(self.module) - len(self.module.lstrip("."))
        folders = PurePosixPath(self.file).parents
        folder = folders[min(dots, len(folders)) - 1] if dots else PurePosixPath()
        parts = list(filter(None, self.module.lstrip(".").split(".")))
        for path in (
            *(parts[:end] for end in range(len(parts) + 1)),
            *([*parts, name] for name in self.names),
        ):
            inner = folder.joinpath(*path)
            yield from (f"{inner}.py", str(inner / "__init__.py"))


def parse_source(content: bytes, name: str) -> ast.Module:
    """Returns the syntax tree of a file. Raises SyntaxError or ValueError if it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(content, name)
        except SyntaxError as error:
            error.filename = name  # it lacks one for a null byte
            raise


def imports_of(file: str, tree: ast.Module) -> Iterator[Import]:
    """Yields the imports in the syntax tree of a file, without those for type checkers alone."""
    # What surely runs: the statements of the module, and those below `if __name__ == "__main__"`.
    certain = {id(node) for node in tree.body}
    for statement in tree.body:
        if isinstance(statement, ast.If) and "'__main__'" in ast.unparse(statement.test):
            certain |= {id(part) for part in statement.body}
    # What never runs, and what may fail.
    skipped = set()
    optional = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for part in node.body:
                skipped |= {id(inner) for inner in ast.walk(part)}
        if isinstance(node, ast.Try):
            caught = ""
            for handler in node.handlers:
                caught += f" {ast.unparse(handler.type) if handler.type else 'Exception'}"
            if re.search("ImportError|ModuleNotFoundError|Exception", caught):
                optional |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        kind = id(node) in certain, id(node) in optional
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, (), *kind)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = tuple(alias.name for alias in node.names)
            yield Import(file, node.lineno, module, names, *kind)


def reached_sources(folder: Path, programs: Sequence[str]) -> dict[str, ast.Module]:
    """Returns the syntax trees of programs and the modules in `folder` that they import.

    Raises SyntaxError or ValueError for a file that Python cannot read, with its name.
    """
    trees = {}
    waiting = [*programs]
    while waiting:
        name = waiting.pop()
        if name not in trees and (folder / name).is_file():
            trees[name] = parse_source((folder / name).read_bytes(), name)
            for statement in imports_of(name, trees[name]):
                waiting += statement.files()
    return trees


# Packages whose objects have a `fit` of another kind.
_FOREIGN = ("sklearn", "xgboost", "lightgbm", "catboost", "imblearn", "statsmodels", "scipy")


def calls_fit(folder: Path, program: str) -> bool:
    """Returns whether a script in `folder`, with the modules beside it, trains by Keras's `fit`.

    They import Keras or TensorFlow, and call `fit` of an object that comes from no other package.
    One that reports its numbers itself, by `vertex_report`, was written to run as it is. A syntax
    error is told by running it.
    """
    try:
        trees = reached_sources(folder, [program])
    except (SyntaxError, ValueError, RecursionError):
        return True
    tops = {statement.top for name, tree in trees.items() for statement in imports_of(name, tree)}
    keras = any(top == "tensorflow" or top.startswith("keras") for top in tops)
    return keras and "vertex_report" not in tops and any(map(_calls_fit, trees.values()))


def _calls_fit(tree: ast.Module) -> bool:
    """Returns whether a source calls `fit` of an object that comes from none of _FOREIGN."""
    foreign = set()  # names that such a package, or an object of it, is bound to
    assigned = []  # names, each with the name that its value begins with
    fits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                package = (getattr(node, "module", "") or alias.name).partition(".")[0]
                if package in _FOREIGN:
                    foreign.add((alias.asname or alias.name).partition(".")[0])
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            assigned += [(name, _root(node.value)) for name in names]
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "fit":
            fits.append(function)
    foreign |= {name for name, source in assigned if source in foreign}
    foreign -= {name for name, source in assigned if source not in foreign}
    return any(_root(function.value) not in foreign for function in fits)


def _root(node: ast.expr) -> str:
    """Returns the first name of an expression such as `name.part(…).other[0]`, or ""."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
