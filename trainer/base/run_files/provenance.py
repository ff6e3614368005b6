"""Says what a run was made of: the user's own sources, and the commit of this package."""

import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from trainer.base.settings.own_settings import is_dotted

COMMIT_FILE = "commit.txt"  # that setup.py writes into the package of a wheel


def own_sources(dotted: str) -> Iterator[tuple[str, Path]]:
    """Yields name and path of the files of the package that a user's function is in; nothing for names of ours."""
    top = dotted.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(top) if is_dotted(dotted) and top != "trainer" else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        yield from ((f"{top}/{path.relative_to(folder).as_posix()}", path) for path in sorted(folder.rglob("*.py")))
    if spec and spec.origin and not folders:
        yield Path(spec.origin).name, Path(spec.origin)


def trainer_commit() -> str | None:
    """Returns the commit of the running sources: of the checkout, or of the one that the wheel was built from."""
    package = Path(__file__).parents[2]
    git = partial(subprocess.run, cwd=package, capture_output=True, text=True, timeout=5, check=True)
    try:
        git(["git", "ls-files", "--error-unmatch", "__init__.py"])
        return str(git(["git", "rev-parse", "HEAD"]).stdout).strip()
    except (OSError, subprocess.SubprocessError):
        built = package / COMMIT_FILE
        return built.read_text(encoding="utf-8").strip() or None if built.is_file() else None
