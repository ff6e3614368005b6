"""Reads .gitignore and .gcloudignore: which files and folders they name, https://git-scm.com/docs/gitignore"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

NAMES = (".gitignore", ".gcloudignore")
ALLOW = "#!allow:"  # begins a line of ours that names a file which goes along, whatever it looks like

Rules = tuple[Path, "GitIgnoreSpec"]  # of the folder below which they apply


def rules_in(folder: Path) -> list[Rules]:
    """Returns the rules of the ignore files in a folder."""
    from pathspec import GitIgnoreSpec

    return [(folder, GitIgnoreSpec.from_lines(lines))] if (lines := _lines(folder)) else []


def rules_above(folder: Path) -> list[Rules]:
    """Returns the rules that apply to a folder from outside: of the folders up to the top of its repository."""
    above = [folder, *folder.parents]
    tops = [index for index, path in enumerate(above) if (path / ".git").exists()]
    return [rules for path in reversed(above[1 : tops[0] + 1] if tops else []) for rules in rules_in(path)]


def is_ignored(path: Path, rules: Sequence[Rules], *, is_folder: bool) -> bool:
    """Returns whether the last rule that matches the path excludes it. The path's folder must not be ignored."""
    checks = (spec.check_file(path.relative_to(top).as_posix() + "/" * is_folder).include for top, spec in rules)
    return ([included for included in checks if included is not None] or [False])[-1]


def allowed_in(folder: Path) -> set[Path]:
    """Returns the files that a folder's ignore files allow."""
    return {folder / line.removeprefix(ALLOW).strip() for line in _lines(folder) if line.startswith(ALLOW)}


def _lines(folder: Path) -> list[str]:
    files = [folder / name for name in NAMES if (folder / name).is_file()]
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
