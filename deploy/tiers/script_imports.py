"""Finds what Python files import, and what a script imports that a plain Python image does not have."""

import ast
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

# Of Python 3.12, which the image has, whichever runs here; pip and the report of ours are there too.
_IN_IMAGE = (sys.stdlib_module_names | {"pip", "vertex_report"}) - {
    "asynchat", "asyncore", "distutils", "imp", "smtpd",
}  # fmt: skip
# The name by which pip installs a package, where it is another.
DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python-headless", "sklearn": "scikit-learn", "yaml": "pyyaml",
                  "skimage": "scikit-image", "bs4": "beautifulsoup4", "dateutil": "python-dateutil"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Import:
    """Holds one import. `module`: as written, with leading dots; `names`: what is taken from it.

    `certain`: whether it is executed in any case: at the top of a module, not in a function, a `try` or an `if`.
    """

    file: str
    line: int
    module: str
    names: tuple[str, ...]
    certain: bool

    @property
    def top(self) -> str:
        """Returns the name of the package; empty for the module's own."""
        return self.module.partition(".")[0]


def imports_of(file: str, tree: ast.Module) -> Iterator[Import]:
    """Yields the imports of a file, of which `tree` is the syntax tree."""
    main = [node for node in tree.body if isinstance(node, ast.If) and "'__main__'" in ast.unparse(node.test)]
    certain = {id(node) for body in (tree.body, *(part.body for part in main)) for node in body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, (), id(node) in certain)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(file, node.lineno, "." * node.level + (node.module or ""), names, id(node) in certain)


def missing_imports(files: Mapping[str, Path], program: str) -> list[Import]:
    """Returns the first import of each package that a script needs in any case, and neither its folder nor image has.

    `files`: of the folder, by their paths in it; those that the script does not import are not looked at.
    """
    present = {part.partition(".")[0] for name in files for part in name.split("/")} | _IN_IMAGE | {""}
    missing, waiting, visited = dict[str, Import](), [program], set[str]()
    while waiting:
        file = waiting.pop()
        if file in files and file not in visited:
            visited.add(file)
            for statement in imports_of(file, ast.parse(files[file].read_bytes())):
                if statement.certain and statement.top in present:
                    waiting += _files_of(statement)
                elif statement.certain:
                    missing.setdefault(statement.top, statement)
    return list(missing.values())


def _files_of(statement: Import) -> Iterator[str]:
    """Yields the files, in the script's folder, that an import would execute."""
    dots = len(statement.module) - len(statement.module.lstrip("."))
    folder = PurePosixPath(statement.file).parents[dots - 1] if dots else PurePosixPath()
    parts = list(filter(None, statement.module.lstrip(".").split(".")))
    for path in (*(parts[:end] for end in range(len(parts) + 1)), *([*parts, name] for name in statement.names)):
        inner = folder.joinpath(*path)
        yield from (f"{inner}.py", str(inner / "__init__.py"))
