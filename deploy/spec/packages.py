"""Builds the trainer and a user's package as wheels for Cloud Storage, from a clean copy of the sources.

A wheel's address contains a hash of the sources, so it is known before the build, and the same sources are built and
uploaded only once, from whichever machine: an object is never replaced.
"""

import dataclasses
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import trainer
from trainer.errors import UserError
from trainer.storage import expanded

ROOT = Path(__file__).parents[2]
DIST = Path("dist")
TRAINER = "vertex_trainer"
_TIME = {"SOURCE_DATE_EPOCH": "315532800"}  # 1980, the earliest ZIP date, for every file in a wheel

# Packages the whole folder: data files, and subfolders without an __init__.py, which Python can import too.
_USER_SETUP = """\
from setuptools import setup

setup(
    name={name!r},
    version="0",
    packages=[{module!r}],
    package_data={{"": ["**/*"]}},
    install_requires={requires!r},
)
"""


@dataclasses.dataclass(frozen=True)
class Package:
    """Holds sources to build: `files` maps paths in the clean copy to contents; `name` is the import name."""

    name: str
    version: str
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Returns 12 hexadecimal digits of the sources' SHA-256."""
        digest = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:12]

    @property
    def folder(self) -> str:
        """Returns the wheel's folder, below dist/ and below the bucket's packages/."""
        return f"{self._stem}-{self.digest}"

    @property
    def wheel(self) -> str:
        """Returns the wheel's file name: https://packaging.python.org/en/latest/specifications/binary-distribution-format/"""
        return f"{self._stem}-py3-none-any.whl"

    @property
    def _stem(self) -> str:
        return f"{_distribution(self.name).replace('-', '_')}-{self.version}"

    def uri(self, bucket: str) -> str:
        """Returns the wheel's address in `bucket`, a gs:// address."""
        return f"{bucket}/packages/{self.folder}/{self.wheel}"


def _distribution(module: str) -> str:
    """Returns pip's name for a module's package: normalised by PEP 503, with a letter or digit first and last.

    The prefix prevents that `keras_` and the like are mistaken for the distribution of that name.
    """
    name = re.sub(r"[^a-z0-9]+", "-", module.lower())
    inner = name.strip("-")
    return name if name == inner else f"user-{inner}".strip("-")


def trainer_package() -> Package:
    """Returns the trainer's sources; UserError if this is an installed copy, which has no setup.py."""
    if not (ROOT / "setup.py").is_file():
        raise UserError(f"{ROOT} has no sources to package: run `python -m deploy` in a checkout, or use --image=URI")
    files = {name: (ROOT / name).read_bytes() for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE")}
    for folder in ("trainer", "deploy"):
        files |= _sources(ROOT / folder)
    return Package(TRAINER, trainer.__version__, files)


def user_package(folder: str) -> Package:
    """Returns a folder that Python can import, with its requirements.txt; UserError if it cannot be imported."""
    path = expanded(folder).resolve()
    if not (path / "__init__.py").is_file() or not path.name.isidentifier():
        raise UserError(
            f"package={folder}: must be a folder that Python can import, such as my_models with an __init__.py"
        )
    if path.name in ("trainer", "deploy") or _distribution(path.name) == _distribution(TRAINER):
        raise UserError(f"package={folder}: {path.name} is a name of this project: rename your package")
    listed = path / "requirements.txt"
    requires = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    requires = [line for line in (line.split("#")[0].strip() for line in requires) if line]
    setup = _USER_SETUP.format(name=_distribution(path.name), module=path.name, requires=requires)
    return Package(path.name, "0", {"setup.py": setup.encode(), **_sources(path)})


def packages_with(folder: str) -> list[Package]:
    """Returns the packages of a job: the user's `folder` unless that is empty, then the trainer."""
    return [*([user_package(folder)] if folder else []), trainer_package()]


def _sources(folder: Path) -> dict[str, bytes]:
    """Returns every file below `folder`, by its path from the folder's parent, without caches and hidden files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder.parent)
        hidden = any(part.startswith((".", "__pycache__")) for part in inner.parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            found[inner.as_posix()] = path.read_bytes()
    return found


def write_copy(package: Package, folder: Path) -> None:
    """Writes only the package's sources below `folder`."""
    for name, content in package.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)  # whatever the umask: the wheel stores it


def _reason(output: str) -> str:
    """Returns the line of the output with the error of setuptools, rather than of its caller."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line or "Error:" in line]
    return (errors or lines or ["python -m build printed nothing"])[-1].strip()


def build_wheel(package: Package) -> Path:
    """Returns the wheel, with its sdist beside it, and builds both if needed; UserError if the build fails."""
    folder = DIST / package.folder
    if (folder / package.wheel).is_file():
        return folder / package.wheel
    if importlib.util.find_spec("build") is None:
        raise UserError("the package `build` is missing: pip install '.[deploy]'")
    with tempfile.TemporaryDirectory() as scratch:
        copy, out = Path(scratch, "copy"), Path(scratch, "out")
        write_copy(package, copy)
        command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={out}", str(copy)]
        done = subprocess.run(  # reproducible: the wheel depends neither on the clock nor on the umask
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | _TIME, umask=0o022
        )
        if done.returncode or not (out / package.wheel).is_file():
            raise UserError(f"{package.name} could not be built: {_reason(done.stdout)}")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(out.iterdir()):  # the sdist before the wheel, which marks the folder as complete
            partial = folder / f".{file.name}.part"
            shutil.copyfile(file, partial)
            partial.replace(folder / file.name)
    return folder / package.wheel
