"""Chooses which files of a user's code go along with a job, and refuses what must not: credentials,
gigabytes.

Of a package these are the files of its folder; of a script the modules that it reaches, and the
files that it names or opens.
"""

import ast
import glob
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from deploy.packaging.credentials import TEXT_BYTES, find_credentials
from trainer.base.errors import UserError, reason
from trainer.base.script import Import, imports_of, parse_source, reached_sources

MOST_MB = 100  # the largest size of a package, unless --max_package_mb says otherwise
MB = 1e6
MOST_NAMES = 12  # how many of the files that are left out a line names
# in an ignore file, begins a line that names a file to ship even if it looks like a credential
ALLOW = "#!allow:"
_SCANNER_BYTES = 5e6  # how much of a package detect-secrets reads, because it is slow


class Sources(NamedTuple):
    """Holds the files that are shipped, by their path there, what is left out, and what the files
    import."""

    files: Mapping[str, Path]
    left_out: tuple[str, ...]
    size: int  # bytes
    imports: tuple[Import, ...]

    def __str__(self) -> str:
        count = (
            f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}, {self.size / MB:.1f} MB"
        )
        names = ", ".join(self.left_out[:MOST_NAMES]) + ", …" * (len(self.left_out) > MOST_NAMES)
        return f"{count}; {len(self.left_out)} left out: {names}" if names else count


def user_sources(folder: Path, most_mb: float = MOST_MB, include: Sequence[str] = ()) -> Sources:
    """Returns the files of the package `folder` (an absolute path) that a job gets.

    `folder` may also be one module, which brings the modules beside it that it imports. In a git
    checkout these are the files that git tracks, and the Python files that it does not ignore;
    elsewhere all files. Left out are caches, hidden files, notebooks, virtual environments, links
    that leave the folder, what the folder's own .gcloudignore names (outside of git also its
    .gitignore), and the folders that this package writes. `include`: patterns, as in
    .gitignore, of files to ship all the same. Raises UserError for a package above `most_mb`, for a
    credential, for a syntax error, and for an import of a file that is left out.
    """
    from pathspec import GitIgnoreSpec

    left_out: list[str] = []
    if folder.is_file():
        modules = _reached(folder.parent, folder.name) if folder.suffix == ".py" else [folder.name]
        beside = [name for name in modules if name.partition("/")[0] not in ("trainer", "deploy")]
        return _checked(
            {name: folder.parent / name for name in beside}, left_out, folder.parent, most_mb
        )
    by_git = _git_files(folder)
    included = GitIgnoreSpec.from_lines(include)
    # https://git-scm.com/docs/gitignore; only of the top folder, as gcloud does.
    lines = _ignore_lines(folder) if by_git is None else _ignore_lines(folder, (".gcloudignore",))
    rules = GitIgnoreSpec.from_lines(lines)

    def ignored(path: Path, is_folder: bool) -> bool:
        inner = path.relative_to(folder).as_posix() + "/" * is_folder
        untracked = by_git is not None and path not in by_git and not is_folder
        return (untracked or rules.match_file(inner)) and not included.match_file(inner)

    walked = _walk(folder, folder.parent, ignored, left_out)
    files = {path.relative_to(folder.parent).as_posix(): path for path in walked}
    return _checked(files, left_out, folder, most_mb)


def script_sources(
    folder: Path,
    program: str,
    words: Sequence[str] = (),
    most_mb: float = MOST_MB,
    include: Sequence[str] = (),
    opened: Sequence[str] = (),
    *,
    force: bool = False,
) -> Sources:
    """Returns the files of a script's `folder` that its job gets: those that `program` reaches.

    That are the modules that it imports, what these and `words`, its arguments, name
    (`_named_files`), and what it `opened` when it was tried. `include`: paths and patterns of other
    files. Raises UserError for files above `most_mb` together, for a credential, for a syntax
    error, for an `include` of nothing and, unless `force`, for an existing path outside of the
    folder.
    """
    if lost := [text for text in include if not glob.glob(text, root_dir=folder, recursive=True)]:
        raise UserError(
            f"include={lost[0]}: nothing in {folder} has this name: give a path or a pattern from"
            " there"
        )
    trees = _reached(folder, program)
    # Texts that may name files, each with its place.
    texts: list[tuple[str, str]] = []
    for name, tree in trees.items():
        texts += _texts(name, tree)
    texts += [(word.partition("=")[2] or word, "an argument") for word in words]
    texts += [(text, "") for text in (*REQUIREMENT_FILES, *include, *opened)]
    files = _named_files(f"script={program}", folder, texts, most_mb, force=force)
    files |= {name: folder / name for name in trees}
    # What is beside these and stays here.
    shipped = {name.partition("/")[0] for name in files}
    beside = [path for path in sorted(folder.iterdir()) if path.name[0] != "."]
    rest = [path for path in beside if path.name not in {*shipped, "__pycache__"}]
    left_out = [path.name + "/" * path.is_dir() for path in rest]
    return _checked(files, left_out, folder, most_mb)


def _reached(folder: Path, program: str) -> dict[str, ast.Module]:
    """Returns the syntax trees of a program and the modules beside it that it reaches, by path in
    the folder."""
    try:
        return reached_sources(folder, [program])
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _unreadable(program, error) from None


def named_data(
    sources: Sources, folder: Path, most_mb: float = MOST_MB, *, force: bool = False
) -> dict[str, Path]:
    """Returns the files, by their path below the working `folder`, that the sources of a package
    name.

    Raises UserError as `script_sources` does.
    """
    modules = {name: path for name, path in sources.files.items() if path.suffix == ".py"}
    texts: list[tuple[str, str]] = []
    for name, path in modules.items():
        texts += _texts(name, parse_source(path.read_bytes(), name))
    subject = f"package={min(modules, default='')}"
    files = _named_files(subject, folder, texts, most_mb, force=force)
    data = {name: path for name, path in files.items() if path.suffix != ".py"}
    return {**_checked(data, [], folder, most_mb).files}


# Folders of the system, whose files a job's machine has, too, or that hold no data.
_SYSTEM = {"bin", "dev", "etc", "gcs", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr"}


def _named_files(
    subject: str, folder: Path, texts: Iterable[tuple[str, str]], most_mb: float, *, force: bool
) -> dict[str, Path]:
    """Returns the files in `folder` that texts name, each text with its place, by path in the
    folder.

    Each names a file, a folder, whose files all count, or a pattern of them. What is hidden or
    `_is_generated` stays, and what the folder's .gcloudignore names unless the text has no place.
    Raises UserError as `script_sources` does, in words that begin with `subject`.
    """
    from pathspec import GitIgnoreSpec

    rules = GitIgnoreSpec.from_lines(_ignore_lines(folder, (".gcloudignore",)))
    files = dict[str, Path]()
    sizes = dict[tuple[str, str], int]()
    for text, place in texts:
        if not text or len(text) > 255 or not text.isprintable():
            continue
        # A path outside of the folder is no path on the job's machines.
        relative = os.path.normpath(os.path.expanduser(text))
        if os.path.isabs(relative) or relative.startswith(".."):
            outside = Path(os.path.normpath(folder / relative))
            inside = outside.is_relative_to(folder) and outside != folder
            advice = f"write {outside.relative_to(folder)}" if inside else _copied(outside)
            if (
                len(outside.parts) > 2
                and outside.parts[1] not in _SYSTEM
                and os.path.exists(outside)
                and not force
            ):
                raise UserError(
                    f"{subject}: {place} names {text}, which the job's machines cannot read:"
                    f" {advice}; or use --force"
                )
            continue
        # The files that it names, or whose folder, or by a pattern.
        pattern = set("*?[") & set(relative) and re.search(r"[^\W_]", relative)
        for inner in (
            sorted(glob.glob(relative, root_dir=folder, recursive=True)) if pattern else [relative]
        ):
            path = folder / inner
            is_folder = os.path.isdir(path)
            if any(part.startswith(".") for part in inner.split("/")):  # the folder itself, too
                continue
            if place and rules.match_file(inner + "/" * is_folder):
                continue
            matches = [path] if os.path.isfile(path) else []
            if is_folder and not _is_generated(path):
                matches = [*_walk(path, folder, lambda file, is_folder: False, [])]
            files |= {file.relative_to(folder).as_posix(): file for file in matches}
            sizes[text, place] = sum(file.stat().st_size for file in matches)
    size = sum(path.stat().st_size for path in files.values())
    if size > most_mb * MB:
        text, place = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"{subject}: {text} ({place or 'opened by it'}) has {sizes[text, place] / MB:,.1f} MB,"
            f" and at most {most_mb:g} MB go along: {_copied(folder / text)}; what it does not read"
            f" may stand in .gcloudignore; --max_package_mb={size / MB + 1:.0f} sends it"
        )
    return files


REQUIREMENT_FILES = ("requirements.txt", "pyproject.toml")  # beside a script they say what it needs
# Functions whose arguments name what a script writes, besides those that begin with save_, to_ and
# write_.
_WRITERS = {
    "save",
    "mkdir",
    "makedirs",
    "export",
    "savefig",
    "imsave",
    "ModelCheckpoint",
    "BackupAndRestore",
    "CSVLogger",
    "TensorBoard",
    "FileHandler",
}


_WRITE_MODE = re.compile(r"'[bt+]*[wax][bt+]*'")  # of open, as it stands in the source


def _texts(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the texts in a source that may be paths which it reads, each with its place."""
    # What stands in a call that writes is not read.
    written = set[int]()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            function = getattr(call.func, "attr", getattr(call.func, "id", ""))
            modes = [*call.args[1:2], *(word.value for word in call.keywords)]
            opens = function == "open" and any(map(_WRITE_MODE.fullmatch, map(ast.unparse, modes)))
            if opens or function in _WRITERS or function.startswith(("save_", "to_", "write_")):
                written |= {id(part) for part in ast.walk(call)}
    for node in ast.walk(tree):
        if id(node) in written:
            continue
        # f"data/part-{number}.csv" is the pattern data/part-*.csv
        if isinstance(node, ast.JoinedStr):
            parts = []
            for part in node.values:
                parts.append(str(part.value) if isinstance(part, ast.Constant) else "*")
            yield "".join(parts), f"{name}, line {node.lineno}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, f"{name}, line {node.lineno}"


def _copied(path: Path) -> str:
    """Returns what a user does with data that do not go along."""
    bucket = f"`gcloud storage cp -r {shlex.quote(str(path))} gs://BUCKET/`"
    return f"copy it by {bucket}, and write /gcs/BUCKET/{path.name}"


def _unreadable(name: str, error: Exception) -> UserError:
    """Returns the error of a source without a syntax tree."""
    place = name
    problem = reason(error)
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}" if error.lineno else f"{error.filename}"
        problem = error.msg
    return UserError(f"package: {place}: {problem}: the job could not import it: fix it")


def _checked(
    files: Mapping[str, Path], left_out: Sequence[str], top: Path, most_mb: float
) -> Sources:
    """Returns files that may go along.

    Raises UserError as `user_sources` does. `top`: has the .gcloudignore.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}
    size = sum(sizes.values())
    if size > most_mb * MB:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"package={top}: {size / MB:,.1f} MB in {len(files)} files, the largest {largest} with"
            f" {sizes[largest] / MB:,.1f}: a package holds code, at most {most_mb:g} MB: name data"
            " in .gcloudignore and read them from a bucket, or allow it with"
            f" --max_package_mb={size / MB + 1:.0f}"
        )
    # No file holds credentials, except those that the user calls harmless. detect-secrets is slow:
    # it reads no large file, and only so much of a package.
    lines = [line for line in _ignore_lines(top) if line.startswith(ALLOW)]
    allowed = {top / line.removeprefix(ALLOW).strip() for line in lines}
    findings = list[tuple[str, str]]()
    scanned = 0
    for name, path in files.items():
        if path not in allowed:
            as_text = sizes[name] <= TEXT_BYTES and scanned + sizes[name] <= _SCANNER_BYTES
            if as_text:
                scanned += sizes[name]
            findings += [(name, finding) for finding in find_credentials(path, as_text=as_text)]
    if findings:
        inner = files[findings[0][0]].relative_to(top).as_posix()
        listed = "; ".join(f"{name}, {finding}" for name, finding in findings)
        raise UserError(
            f"package: these look like credentials: {listed}: they would be stored in the bucket"
            " and in the job, whose account needs no key: read them from a variable that"
            " --secret=NAME=projects/P/secrets/S/versions/latest sets, move them out of the"
            f" folder, or name the files in .gcloudignore. What is harmless: a line {ALLOW}{inner}"
            f" in {top.name}/.gcloudignore, or in the line itself # pragma: allowlist secret"
        )
    # No file imports one that is left out.
    imports: list[Import] = []
    for name, path in files.items():
        if path.suffix == ".py":
            try:
                imports += imports_of(name, parse_source(path.read_bytes(), name))
            except (SyntaxError, ValueError, RecursionError) as error:
                raise _unreadable(name, error) from None
    for statement in imports:
        if lost := next((file for file in statement.files() if file in left_out), None):
            raise UserError(
                f"package: {statement.file}, line {statement.line}, imports {lost}, which does not"
                " go along: git or .gcloudignore ignores it: take it out of there, or give"
                f" --include={PurePosixPath(lost).name}"
            )
    return Sources(files, tuple(left_out), size, tuple(imports))


def _git_files(folder: Path) -> set[Path] | None:
    """Returns the files in the folder that git tracks, and the Python files that it does not
    ignore.

    Returns None outside of a git checkout, and for a folder that git ignores as a whole, such as
    one in runs/.
    """
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", str(folder)], cwd=folder, capture_output=True, check=False
    )
    if ignored.returncode == 0:
        return None
    listed: set[Path] = set()
    for which in (["--cached"], ["--others", "--exclude-standard", "--", "*.py"]):
        git = subprocess.run(
            ["git", "ls-files", "-z", *which],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if git.returncode:
            return None
        listed |= {folder / name for name in git.stdout.split("\0") if name}
    return listed


def _walk(
    folder: Path, top: Path, ignored: Callable[[Path, bool], bool], left_out: list[str]
) -> Iterator[Path]:
    """Yields the files of a folder to ship, and adds to `left_out` the names below `top` that a
    user may miss.

    `ignored`: says of a path, and whether it is a folder, that it is to stay.
    """
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
                continue
            is_folder = path.is_dir()
            leaves_folder = path.is_symlink() and (
                is_folder or not path.resolve().is_relative_to(folder.resolve())
            )
            is_source = (is_folder or path.is_file()) and path.suffix != ".ipynb"
            if leaves_folder or _is_generated(path) or not is_source or ignored(path, is_folder):
                left_out.append(path.relative_to(top).as_posix() + "/" * is_folder)
            elif is_folder:
                waiting.append(path)
            else:
                yield path


def _is_generated(folder: Path) -> bool:
    """Returns whether programs write the folder: a virtual environment, and what this package
    writes here."""
    ours = (Path("runs").resolve(), Path("dist").resolve())
    return folder in ours or (folder / "pyvenv.cfg").is_file()


def _ignore_lines(
    folder: Path, names: Sequence[str] = (".gitignore", ".gcloudignore")
) -> list[str]:
    lines = list[str]()
    for file in (folder / name for name in names):
        if file.is_file():
            lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines
