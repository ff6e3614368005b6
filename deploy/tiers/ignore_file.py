"""Reads .gitignore and .gcloudignore: which files and folders they name, https://git-scm.com/docs/gitignore"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

NAMES = (".gitignore", ".gcloudignore")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Holds one line: it applies below `folder`, to names that `pattern` matches; `keep` reverses earlier rules."""

    folder: Path
    pattern: re.Pattern[str]
    folders_only: bool
    keep: bool


def rules_in(folder: Path) -> list[Rule]:
    """Returns the rules of the ignore files in a folder."""
    files = [folder / name for name in NAMES if (folder / name).is_file()]
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [rule for line in lines if (rule := _rule(folder, line))]


def rules_above(folder: Path) -> list[Rule]:
    """Returns the rules that apply to a folder from outside: of the folders up to the top of its repository."""
    above = [folder, *folder.parents]
    tops = [index for index, path in enumerate(above) if (path / ".git").exists()]
    outer = above[1 : tops[0] + 1] if tops else []
    return [rule for path in reversed(outer) for rule in rules_in(path)]


def is_ignored(path: Path, rules: Sequence[Rule], *, is_folder: bool) -> bool:
    """Returns whether the last rule that matches the path excludes it. The path's folder must not be ignored."""
    ignored = False
    for rule in rules:
        if rule.folders_only and not is_folder:
            continue
        if rule.pattern.fullmatch(path.relative_to(rule.folder).as_posix()):
            ignored = not rule.keep
    return ignored


def _rule(folder: Path, line: str) -> Rule | None:
    """Returns the rule of a line; None for blank lines and comments (#!include:.gitignore is one: both files apply)."""
    text = line.rstrip() if not line.endswith("\\ ") else line
    if not text or text.startswith("#"):
        return None
    keep, text = text.startswith("!"), text.removeprefix("!").removeprefix("\\")
    folders_only, text = text.endswith("/"), text.rstrip("/")
    anchored, text = "/" in text, text.removeprefix("/")
    return Rule(folder, re.compile(("" if anchored else "(?:.*/)?") + _expression(text), re.DOTALL), folders_only, keep)


_PARTS = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _expression(glob: str) -> str:
    """Returns the regular expression of a pattern such as `a/**/*.[ch]`."""
    parts = re.split(r"(\*\*/|/\*\*$|\*\*|\*|\?|\[!?\]?[^\]]*\]|\\.)", glob)
    return "".join(_part(part) for part in parts)


def _part(part: str) -> str:
    if part in _PARTS:
        return _PARTS[part]
    if part.startswith("[") and len(part) > 2:
        negated = part[1] in "!^"
        return "[" + ("^" if negated else "") + re.sub(r"([\\\[\]^])", r"\\\1", part[1 + negated : -1]) + "]"
    return re.escape(part.removeprefix("\\") if len(part) == 2 else part)
