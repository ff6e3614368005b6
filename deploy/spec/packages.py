"""The trainer, and a package of the user's own, as wheels in Cloud Storage: built from a clean copy, sent once.

An address carries version and a hash of the sources, so it is known without building, and the same sources are neither
built nor sent again: what lies at an address stays, whichever machine built it.
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
OWN = "vertex_trainer"
_TIME = {"SOURCE_DATE_EPOCH": "315532800"}  # 1980, where ZIP begins: of every file in a wheel

# The folder with all that lies below it: data, and subfolders without an __init__.py, which Python imports as well.
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
    """Sources to build: `files` maps the path in the clean copy to the content. Python imports a user's by `name`."""

    name: str
    version: str
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """12 hexadecimal digits of the sources' SHA-256."""
        total = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            total.update(f"{path}\0{len(content)}\0".encode() + content)
        return total.hexdigest()[:12]

    @property
    def folder(self) -> str:
        """Where its wheel lies, below dist/ and below the bucket's packages/."""
        return f"{self._stem}-{self.digest}"

    @property
    def wheel(self) -> str:
        """The wheel's file name: https://packaging.python.org/en/latest/specifications/binary-distribution-format/"""
        return f"{self._stem}-py3-none-any.whl"

    @property
    def _stem(self) -> str:
        return f"{_distribution(self.name).replace('-', '_')}-{self.version}"

    def uri(self, bucket: str) -> str:
        """The wheel's address in `bucket`, a gs:// address."""
        return f"{bucket}/packages/{self.folder}/{self.wheel}"


def _distribution(module: str) -> str:
    """What pip calls the package of a module: normalised as PEP 503 has it, with a letter or digit first and last.

    What has to be added keeps `keras_` and the like from passing for the distribution of that name.
    """
    name = re.sub(r"[^a-z0-9]+", "-", module.lower())
    inner = name.strip("-")
    return name if name == inner else f"user-{inner}".strip("-")


def own_package() -> Package:
    """The trainer's sources; UserError where this runs from an installed copy, which has none to ship."""
    if not (ROOT / "setup.py").is_file():
        raise UserError(f"{ROOT} holds no sources to package: run `python -m deploy` in a checkout, or use --image=URI")
    files = {name: (ROOT / name).read_bytes() for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE")}
    for folder in ("trainer", "deploy"):
        files |= _sources(ROOT / folder)
    return Package(OWN, trainer.__version__, files)


def user_package(folder: str) -> Package:
    """A folder that Python can import, and its requirements.txt; UserError where it is none."""
    path = expanded(folder).resolve()
    if not (path / "__init__.py").is_file() or not path.name.isidentifier():
        raise UserError(
            f"package={folder}: a folder that Python can import is needed, such as my_models with an __init__.py"
        )
    if path.name in ("trainer", "deploy") or _distribution(path.name) == _distribution(OWN):
        raise UserError(f"package={folder}: {path.name} is this project's own name: give yours another")
    listed = path / "requirements.txt"
    requires = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    requires = [line for line in (line.split("#")[0].strip() for line in requires) if line]
    setup = _USER_SETUP.format(name=_distribution(path.name), module=path.name, requires=requires)
    return Package(path.name, "0", {"setup.py": setup.encode(), **_sources(path)})


def packages_with(folder: str) -> list[Package]:
    """What a job needs: the trainer, and before it the user's `folder` unless that is empty."""
    return [*([user_package(folder)] if folder else []), own_package()]


def _sources(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, by its path from the folder's parent, without caches and hidden files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder.parent)
        hidden = any(part.startswith((".", "__pycache__")) for part in inner.parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            found[inner.as_posix()] = path.read_bytes()
    return found


def write_copy(package: Package, folder: Path) -> None:
    """Writes the sources, and nothing else, below `folder`."""
    for name, content in package.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)  # whatever the umask: a wheel keeps it


def _reason(output: str) -> str:
    """The line in which setuptools, rather than its caller, says what is wrong."""
    lines = [line for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line or "Error:" in line]
    return (telling or lines or ["no word from python -m build"])[-1].strip()


def build(package: Package) -> Path:
    """The wheel, with its sdist beside it; built only where it is not there yet. UserError where building fails."""
    folder = DIST / package.folder
    if (folder / package.wheel).is_file():
        return folder / package.wheel
    if importlib.util.find_spec("build") is None:
        raise UserError("the package `build` is missing: pip install '.[deploy]'")
    with tempfile.TemporaryDirectory() as scratch:
        copy, out = Path(scratch, "copy"), Path(scratch, "out")
        write_copy(package, copy)
        command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={out}", str(copy)]
        done = subprocess.run(  # every time alike: neither the clock nor the umask is seen in the wheel
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | _TIME, umask=0o022
        )
        if done.returncode or not (out / package.wheel).is_file():
            raise UserError(f"{package.name} could not be built: {_reason(done.stdout)}")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(out.iterdir()):  # the sdist before the wheel, which says that all is there
            beside = folder / f".{file.name}.part"
            shutil.copyfile(file, beside)
            beside.replace(folder / file.name)
    return folder / package.wheel
