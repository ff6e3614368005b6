"""Chooses which files of a user's package go along with a job, and refuses what must not: credentials, gigabytes."""

import ast
import dataclasses
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from deploy.tiers.ignore_file import is_ignored, rules_above, rules_in
from trainer.base.errors import UserError, reason

MOST_MB = 100  # of a package, unless --max_package_mb says otherwise
MB = 1e6
_SCANNED_BYTES = 2**20  # of the beginning of each file

_SECRET_NAMES = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|ppk|kdbx|p8|env)|id_(rsa|dsa|ecdsa|ed25519).*|env|kaggle\.json"
    r"|.*(credential|client_?secret|service[_-]?account|secret).*\.(json|ya?ml|txt|ini|toml|cfg|csv)|htpasswd|netrc",
    re.IGNORECASE,
)
_PUBLIC = re.compile(rb"-----BEGIN (CERTIFICATE|PUBLIC KEY)-----")
_SECRETS = {
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----"),
    "a service account's key": re.compile(rb'"type"\s*:\s*"(service_account|authorized_user|external_account)"'),
    "a key of a cloud or a service": re.compile(
        rb"\b(AKIA[0-9A-Z]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}|gh[pousr]_\w{36}|github_pat_\w{40,}|hf_[A-Za-z]{30,}"
        rb"|xox[abprs]-[\w-]{10,}|sk-[\w-]{32,}|glpat-[\w-]{20})"
    ),
}


@dataclasses.dataclass(frozen=True)
class Sources:
    """Holds the files that go along, by their path from the package's parent, and those that are left out."""

    files: Mapping[str, Path]
    left_out: tuple[str, ...]
    size: int  # bytes

    def __str__(self) -> str:
        count = f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}, {self.size / MB:.1f} MB"
        more = ", …" if len(self.left_out) > 3 else ""
        return count + (f"; left out: {', '.join(self.left_out[:3])}{more}" if self.left_out else "")


def user_sources(folder: Path, most_mb: float = MOST_MB, outputs: Collection[Path] = ()) -> Sources:
    """Returns the files of the package `folder` (an absolute path) that go along with a job, or itself if it is one.

    Leaves out caches, hidden files, notebooks, virtual environments, what .gitignore and .gcloudignore name, links that
    leave the folder, and the folders `outputs`, which this package writes.
    Raises UserError for a package above `most_mb`, for what looks like a credential, and for a syntax error.
    """
    left_out: list[str] = []
    files = {path.relative_to(folder.parent).as_posix(): path for path in _walk(folder, left_out, outputs)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    size = sum(sizes.values())
    if size > most_mb * MB:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"package={folder}: {size / MB:,.1f} MB in {len(files)} files, the largest {largest} with "
            f"{sizes[largest] / MB:,.1f}: a package holds code, at most {most_mb:g} MB: name data in .gcloudignore and "
            f"read them from a bucket, or allow it with --max_package_mb={size / MB + 1:.0f}"
        )
    for name, path in files.items():
        _refuse_secret(name, path)
        if path.suffix == ".py":
            tree = _parsed(name, path)
            if path == folder:
                _check_alone(folder, tree)
    return Sources(files, tuple(left_out), size)


def _walk(folder: Path, left_out: list[str], outputs: Collection[Path]) -> Iterator[Path]:
    """Yields the files to ship, and adds to `left_out` what a user may miss."""
    if folder.is_file():
        yield folder
        return
    top, waiting = folder.resolve(), [(folder, rules_above(folder))]
    while waiting:
        current, above = waiting.pop()
        rules = [*above, *rules_in(current)]
        for path in sorted(current.iterdir()):
            if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
                continue
            is_folder = path.is_dir()
            leaves = path.is_symlink() and (is_folder or not path.resolve().is_relative_to(top))
            kept = (is_folder or path.is_file()) and path.suffix != ".ipynb"
            made = is_folder and (path in outputs or (path / "pyvenv.cfg").is_file())
            if leaves or made or not kept or is_ignored(path, rules, is_folder=is_folder):
                left_out.append(path.relative_to(folder.parent).as_posix() + "/" * is_folder)
            elif is_folder:
                waiting.append((path, rules))
            else:
                yield path


def _refuse_secret(name: str, path: Path) -> None:
    """Raises UserError if the file's name or the first megabyte of its content looks like a credential."""
    with path.open("rb") as file:
        content = file.read(_SCANNED_BYTES)
    kind = next((what for what, pattern in _SECRETS.items() if pattern.search(content)), "")
    if not kind and _SECRET_NAMES.fullmatch(path.name) and not _PUBLIC.search(content):
        kind = "a credential by its name"
    if kind:
        raise UserError(
            f"package: {name} looks like {kind}: it would be stored in the bucket and in the job: move it out of the "
            "folder, or name it in .gcloudignore; a job's own account needs no key"
        )


def _parsed(name: str, path: Path) -> ast.Module:
    """Returns the syntax tree of a file. Raises UserError if Python could not import it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes(), name)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else reason(error)
        raise UserError(f"package: {name}{line}: {what}: the job could not import it: fix it") from None


def _check_alone(module: Path, tree: ast.Module) -> None:
    """Raises UserError if a module that goes along alone imports one from its folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names, relative = [node.module or ""], node.level > 0
        elif isinstance(node, ast.Import):
            names, relative = [alias.name for alias in node.names], False
        else:
            continue
        tops = {name.partition(".")[0] for name in names} - {"trainer", "deploy"}
        beside = [module.parent / file for top in tops for file in (f"{top}.py", f"{top}/__init__.py")]
        if relative or any(file.is_file() for file in beside):
            raise UserError(
                f"package: {module.name}, line {node.lineno}, imports from its folder, which does not go along: use "
                "--package=FOLDER with both and an __init__.py"
            )
