"""Chooses which files of a user's package go along with a job, and refuses what must not: credentials, gigabytes."""

import ast
import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from deploy.packaging.credentials import TEXT_BYTES, find_credentials
from trainer.base.errors import UserError, reason

MOST_MB = 100  # the largest size of a package, unless --max_package_mb says otherwise
MB = 1e6
MOST_NAMES = 12  # how many of the files that are left out a line names
ALLOW = "#!allow:"  # in an ignore file, begins a line that names a file to ship even if it looks like a credential
_SCANNER_BYTES = 5e6  # how much of a package detect-secrets reads, because it is slow


@dataclasses.dataclass(frozen=True)
class Sources:
    """Holds the files that are shipped, by their path from the package's parent folder, and what is left out."""

    files: Mapping[str, Path]
    left_out: tuple[str, ...]
    size: int  # bytes

    def __str__(self) -> str:
        count = f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}, {self.size / MB:.1f} MB"
        names = ", ".join(self.left_out[:MOST_NAMES]) + ", …" * (len(self.left_out) > MOST_NAMES)
        return f"{count}; {len(self.left_out)} left out: {names}" if names else count


def user_sources(
    folder: Path, most_mb: float = MOST_MB, outputs: Collection[Path] = (), include: Sequence[str] = ()
) -> Sources:
    """Returns the files of the package `folder` (an absolute path) that a job gets; `folder` may also be one module.

    In a git checkout these are the files that git tracks, and the Python files that it does not ignore; elsewhere all
    files. Left out are caches, hidden files, notebooks, virtual environments, links that leave the folder, what the
    folder's own .gcloudignore names (outside of git also its .gitignore), and the folders `outputs`, which this package
    writes. `include`: patterns, as in .gitignore, of files to ship although git does not track them.
    Raises UserError for a package above `most_mb`, for a credential, for a syntax error, and for an import of a file
    that is left out.
    """
    left_out: list[str] = []
    files = {path.relative_to(folder.parent).as_posix(): path for path in _walk(folder, left_out, outputs, include)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    size = sum(sizes.values())
    if size > most_mb * MB:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"package={folder}: {size / MB:,.1f} MB in {len(files)} files, the largest {largest} with "
            f"{sizes[largest] / MB:,.1f}: a package holds code, at most {most_mb:g} MB: name data in .gcloudignore and "
            f"read them from a bucket, or allow it with --max_package_mb={size / MB + 1:.0f}"
        )
    top = folder if folder.is_dir() else folder.parent
    allowed = {top / line.removeprefix(ALLOW).strip() for line in _ignore_lines(top) if line.startswith(ALLOW)}
    findings, scanned = list[tuple[str, str]](), 0
    for name, path in files.items():
        if path not in allowed:
            as_text = sizes[name] <= TEXT_BYTES and scanned + sizes[name] <= _SCANNER_BYTES
            scanned += sizes[name] * as_text
            findings += [(name, finding) for finding in find_credentials(path, as_text=as_text)]
    if findings:
        inner = files[findings[0][0]].relative_to(top).as_posix()
        named = "; ".join(f"{name}, {finding}" for name, finding in findings)
        raise UserError(
            f"package: these look like credentials: {named}: they would be stored in the bucket and in "
            "the job, whose own account needs no key: move them out of the folder, or name the files in .gcloudignore. "
            f"What is harmless: a line {ALLOW}{inner} in {top.name}/.gcloudignore, or in the line itself "
            "# pragma: allowlist secret"
        )
    for name, path in files.items():
        if path.suffix == ".py":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(path.read_bytes(), name)
            except (SyntaxError, ValueError, RecursionError) as error:
                line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
                problem = error.msg if isinstance(error, SyntaxError) else reason(error)
                raise UserError(f"package: {name}{line}: {problem}: the job could not import it: fix it") from None
            for statement in imports_of(name, tree):
                if path == folder:  # a single module is shipped without its neighbours
                    beside = [top / file for file in (f"{statement.top}.py", f"{statement.top}/__init__.py")]
                    neighbour = statement.top not in ("trainer", "deploy") and any(file.is_file() for file in beside)
                    if neighbour or not statement.top:
                        raise UserError(
                            f"package: {name}, line {statement.line}, imports from its folder, which does not go "
                            "along: use --package=FOLDER with both and an __init__.py"
                        )
                if lost := next((file for file in _files_of(statement) if file in left_out), None):
                    raise UserError(
                        f"package: {name}, line {statement.line}, imports {lost}, which does not go along: git or "
                        f".gcloudignore ignores it: take it out of there, or give --include={PurePosixPath(lost).name}"
                    )
    return Sources(files, tuple(left_out), size)


def _git_files(folder: Path) -> set[Path] | None:
    """Returns the files in the folder that git tracks, and the Python files that it does not ignore.

    Returns None outside of a git checkout.
    """
    listed: set[Path] = set()
    for which in (["--cached"], ["--others", "--exclude-standard", "--", "*.py"]):
        git = subprocess.run(["git", "ls-files", "-z", *which], cwd=folder, capture_output=True, text=True, check=False)
        if git.returncode:
            return None
        listed |= {folder / name for name in git.stdout.split("\0") if name}
    return listed


def _walk(folder: Path, left_out: list[str], outputs: Collection[Path], include: Sequence[str]) -> Iterator[Path]:
    """Yields the files to ship, and adds to `left_out` the names of files that a user may miss."""
    from pathspec import GitIgnoreSpec

    if folder.is_file():
        yield folder
        return
    by_git, included = _git_files(folder), GitIgnoreSpec.from_lines(include)
    # https://git-scm.com/docs/gitignore; only of the top folder, as gcloud does.
    lines = _ignore_lines(folder) if by_git is None else _ignore_lines(folder, (".gcloudignore",))
    rules = GitIgnoreSpec.from_lines(lines)
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
                continue
            is_folder = path.is_dir()
            leaves_folder = path.is_symlink() and (is_folder or not path.resolve().is_relative_to(folder.resolve()))
            is_source = (is_folder or path.is_file()) and path.suffix != ".ipynb"
            is_output = is_folder and (path in outputs or (path / "pyvenv.cfg").is_file())
            inner = path.relative_to(folder).as_posix()
            ignored = rules.match_file(inner + "/" * is_folder)
            if not is_folder and not included.match_file(inner):
                ignored = ignored or (by_git is not None and path not in by_git)
            if leaves_folder or is_output or not is_source or ignored:
                left_out.append(path.relative_to(folder.parent).as_posix() + "/" * is_folder)
            elif is_folder:
                waiting.append(path)
            else:
                yield path


def _ignore_lines(folder: Path, names: Sequence[str] = (".gitignore", ".gcloudignore")) -> list[str]:
    files = [folder / name for name in names if (folder / name).is_file()]
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]


# What can be imported in the image, which has Python 3.12: its standard library (so without the modules that 3.12
# removed, whichever Python runs here), pip, and our vertex_report.
_IN_IMAGE = (sys.stdlib_module_names | {"pip", "vertex_report"}) - {
    "asynchat", "asyncore", "distutils", "imp", "smtpd",
}  # fmt: skip
# The name by which pip installs a package, where it differs from the name that is imported.
DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python-headless", "sklearn": "scikit-learn", "yaml": "pyyaml",
                  "skimage": "scikit-image", "bs4": "beautifulsoup4", "dateutil": "python-dateutil"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Import:
    """Holds one import statement. `module`: as written, with leading dots; `names`: the names after `import`.

    `certain`: whether it is always executed: it is at the top level of a module or of its `if __name__ == "__main__"`,
    not in a function, a `try` or another `if`.
    """

    file: str
    line: int
    module: str
    names: tuple[str, ...]
    certain: bool

    @property
    def top(self) -> str:
        """Returns the name of the top-level package; empty for a relative import."""
        return self.module.partition(".")[0]


def imports_of(file: str, tree: ast.Module) -> Iterator[Import]:
    """Yields the imports in the syntax tree `tree` of a file."""
    main = [node for node in tree.body if isinstance(node, ast.If) and "'__main__'" in ast.unparse(node.test)]
    certain = {id(node) for body in (tree.body, *(part.body for part in main)) for node in body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, (), id(node) in certain)
        elif isinstance(node, ast.ImportFrom):
            yield Import(file, node.lineno, "." * node.level + (node.module or ""),
                         tuple(alias.name for alias in node.names), id(node) in certain)  # fmt: skip


def missing_imports(files: Mapping[str, Path], program: str) -> list[Import]:
    """Returns the first import of each package that a script always imports and that neither its folder nor image has.

    `files`: the files of the folder, by their paths in it; of these only `program` and what it imports are read.
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
