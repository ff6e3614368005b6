"""Says what a run was made of: the user's own sources, packages, the processor, the commit and the image."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

from trainer.base.settings.own_settings import is_dotted
from trainer.base.settings.train_config import TrainConfig

COMMIT_FILE = "commit.txt"  # that setup.py writes into the package of a wheel
IMAGE_DIGEST = "TRAINER_IMAGE_DIGEST"  # an environment variable of a job whose image is named by its digest
# From the widest vectors down: what the kernels of TensorFlow and its libraries choose by.
_INSTRUCTIONS = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "avx", "sve", "asimd")


def user_sources(config: TrainConfig) -> dict[str, str]:
    """Returns the SHA-256 of each file of the user's model, data and callbacks, by its path below its package."""
    digests = {}
    for dotted in (config.model, config.data, config.callbacks):
        for name, path in own_sources(dotted):
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(digests.items()))


def own_sources(dotted: str) -> Iterator[tuple[str, Path]]:
    """Yields name and path of the files of the package that a user's function is in; nothing for names of ours."""
    top = dotted.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(top) if is_dotted(dotted) and top != "trainer" else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        yield from ((f"{top}/{path.relative_to(folder).as_posix()}", path) for path in sorted(folder.rglob("*.py")))
    if spec and spec.origin and not folders:
        yield Path(spec.origin).name, Path(spec.origin)


def packages() -> dict[str, str]:
    """Returns the version of each installed package, by its name."""
    named = ((package.metadata["Name"], package.version) for package in distributions())
    return dict(sorted((name.lower().replace("_", "-"), version) for name, version in named if name))


def instruction_set() -> str:
    """Returns the widest vector instructions of this processor, as `avx512f`, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    flags = set(line.partition(":")[2].split())
    return next((name for name in _INSTRUCTIONS if name in flags), platform.machine())


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


def image_digest() -> str | None:
    """Returns the digest of the container's image, where its environment names it."""
    return os.environ.get(IMAGE_DIGEST) or None
