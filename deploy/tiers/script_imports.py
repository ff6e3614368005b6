"""Finds what Python files import, and what a script imports that a plain Python image does not have."""

import ast
import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

# Of Python 3.12, which the image has, whichever runs here; pip and the report of ours are there too.
_IN_IMAGE = (sys.stdlib_module_names | {"pip", "vertex_report"}) - {
    "asynchat", "asyncore", "distutils", "imp", "smtpd",
}  # fmt: skip
_DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python-headless", "sklearn": "scikit-learn", "yaml": "pyyaml",
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

    @property
    def distribution(self) -> str:
        """Returns the name by which pip installs it, as far as that is known."""
        return _DISTRIBUTIONS.get(self.top, self.top)


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
    """Returns the first import of each package that a script needs and that neither its folder nor the image has.

    `files`: of the folder, by their paths in it; those that the script does not import are not looked at.
    """
    present = {part.partition(".")[0] for name in files for part in name.split("/")} | _IN_IMAGE
    missing: dict[str, Import] = {}
    for certain in (True, False):  # first what is executed in any case, then the rest
        waiting, visited = [program], set[str]()
        while waiting:
            file = waiting.pop()
            if file in visited or file not in files:
                continue
            visited.add(file)
            for statement in imports_of(file, ast.parse(files[file].read_bytes())):
                if statement.certain < certain:
                    continue
                if statement.top in present or not statement.top:
                    waiting += _files_of(statement)
                else:
                    missing.setdefault(statement.top, dataclasses.replace(statement, certain=certain))
    return list(missing.values())


def _files_of(statement: Import) -> Iterator[str]:
    """Yields the files, in the script's folder, that an import would execute."""
    dots = len(statement.module) - len(statement.module.lstrip("."))
    folder = PurePosixPath(statement.file).parents[dots - 1] if dots else PurePosixPath()
    parts = list(filter(None, statement.module.lstrip(".").split(".")))
    for path in (*(parts[:end] for end in range(len(parts) + 1)), *([*parts, name] for name in statement.names)):
        inner = folder.joinpath(*path)
        yield from (f"{inner}.py", str(inner / "__init__.py"))


def unnamed(missing: Collection[Import], requirements: str) -> list[Import]:
    """Returns the imports whose package the text of a requirements.txt does not name."""
    listed = requirements.lower().replace("_", "-")
    return [statement for statement in missing if statement.distribution.lower() not in listed]
