"""Builds the trainer and a user's package as wheels for Cloud Storage, from a clean copy of the
sources.

A wheel's address contains the hashes of its sources and of the wheel itself. So a folder builds the
same sources once, any number of machines upload the same wheel once, and an object in the bucket is
never replaced.
"""

import dataclasses
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import trainer
from deploy.packaging.distributions import (
    INSTALLED,
    OURS,
    canonical,
    check_requirement,
    listed_requirements,
    requirements_of,
)
from deploy.packaging.sources import MOST_MB, named_data, user_sources
from deploy.tiers.tier import COPIES, ROOT, beside
from trainer.base.errors import UserError
from trainer.base.run_files.job_files import COMMIT_FILE, trainer_commit
from trainer.base.storage import expanded
from trainer.base.storage.staging import cache_home

DIST = cache_home("") / "dist"  # built packages, which the next command finds
TRAINER = "vertex_trainer"
# files that the trainer's build needs
_BESIDE = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
# Every file in a wheel or archive gets the earliest date of ZIP, so that equal files make equal
# archives.
_TIME = {"SOURCE_DATE_EPOCH": "315532800"}
_EARLIEST = (1980, 1, 1, 0, 0, 0)

# The wheel of a folder contains all its files: data files, and subfolders without an __init__.py,
# which Python can import too.
_USER_SETUP = """\
from setuptools import setup

setup(
    name={name!r},
    version="0",
    py_modules={modules!r},
    packages={packages!r},
    package_data={{"": ["**/*"]}},
    install_requires={requires!r},
)
"""


@dataclasses.dataclass(frozen=True)
class Package:
    """Holds the sources of a wheel.

    `name`: that of its import; `files`: their contents, by path in the clean copy.

    Files are hashed and copied block by block, since a package may be larger than the memory.
    """

    name: str
    version: str
    files: Mapping[str, bytes | Path]
    about: str = ""  # a line for people on what is shipped
    # files of the folder in which it is to run
    data: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    requires: Sequence[str] = ()  # what pip installs with the wheel

    @cached_property
    def digest(self) -> str:
        """Returns 12 hexadecimal digits of the sources' SHA-256."""
        digest = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            with _opened(content) as file:
                digest.update(
                    os.fsencode(path) + b"\0" + hashlib.file_digest(file, "sha256").digest()
                )
        return digest.hexdigest()[:12]

    @property
    def folder(self) -> str:
        """Returns the name of the wheel's folder in the cache; in the bucket's packages/ its hash
        follows it."""
        return f"{self._stem}-{self.digest}"

    @property
    def wheel(self) -> str:
        """Returns the wheel's file name:
        https://packaging.python.org/en/latest/specifications/binary-distribution-format/"""
        return f"{self._stem}-py3-none-any.whl"

    @property
    def _stem(self) -> str:
        return f"{canonical(self.name).replace('-', '_')}-{self.version}"

    @cached_property
    def sha256(self) -> str:
        """Returns the SHA-256 of the wheel, which is built if needed."""
        return hashlib.sha256(self.build().read_bytes()).hexdigest()

    def uri(self, bucket: str) -> str:
        """Returns the wheel's address in `bucket`, itself a gs:// address."""
        return f"{bucket}/packages/{self.folder}-{self.sha256[:12]}/{self.wheel}"

    def build(self) -> Path:
        """Builds the file to upload unless the cache has it, and returns its path.

        Raises UserError if the build fails.
        """
        folder = DIST / self.folder
        if not (folder / self.wheel).is_file():
            with tempfile.TemporaryDirectory() as scratch:
                self._make(Path(scratch, "out"))
                folder.mkdir(parents=True, exist_ok=True)
                # the wheel last: it marks the folder as complete
                for file in sorted(Path(scratch, "out").iterdir()):
                    # another thread may build it too
                    partial = folder / f".{file.name}.{Path(scratch).name}"
                    shutil.copyfile(file, partial)
                    partial.replace(folder / file.name)
        return folder / self.wheel

    def _make(self, out: Path) -> None:
        """Makes the sdist and the wheel in the folder `out`: the same bytes whatever the clock and
        the umask."""
        copy = out.with_name("copy")
        write_copy(self, copy)
        command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={out}", str(copy)]
        build = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | _TIME,
            umask=0o022,
        )
        if build.returncode or not (out / self.wheel).is_file():
            lines = ["python -m build printed nothing", *build.stdout.strip().splitlines()]
            # The last line is often that of build, which called setuptools; an error of setuptools
            # says more.
            errors = [line for line in lines if "error" in line or "Error:" in line]
            raise UserError(
                f"{self.name} could not be built: {(errors or lines)[-1].strip()} (needs build,"
                " setuptools and wheel)"
            )


@dataclasses.dataclass(frozen=True)
class CodeArchive(Package):
    """Holds the files of a ZIP archive, which a job unpacks instead of installing it as a wheel."""

    @property
    def wheel(self) -> str:
        """Returns the archive's file name."""
        return f"{self._stem}.zip"

    def _make(self, out: Path) -> None:
        """Writes the archive to the folder `out`."""
        out.mkdir()
        with zipfile.ZipFile(out / self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sorted(self.files.items()):
                entry = zipfile.ZipInfo(name, _EARLIEST)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                with (
                    _opened(content) as source,
                    archive.open(entry, "w", force_zip64=True) as target,
                ):
                    shutil.copyfileobj(source, target)


def _opened(content: bytes | Path) -> io.BytesIO | io.BufferedReader:
    """Opens the content of a package's file, given as bytes or as a path, for reading."""
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def trainer_package() -> Package:
    """Returns the trainer as a package, with a file that names its commit; the same from a checkout
    or a wheel."""
    files: dict[str, bytes | Path] = {name: beside(name) for name in _BESIDE}
    for folder in (beside("job_configs"), *(ROOT / name for name in OURS)):
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder.parent)
            hidden = any(part.startswith((".", "__pycache__")) for part in inner.parts)
            if path.is_file() and not hidden and inner.parts[:2] != COPIES.parts[-2:]:
                files[inner.as_posix()] = path
    if commit := trainer_commit():
        files[f"trainer/{COMMIT_FILE}"] = f"{commit}\n".encode()
    return Package(TRAINER, trainer.__version__, files, requires=INSTALLED)


def user_package(
    address: str, most_mb: float = MOST_MB, include: Sequence[str] = (), *, force: bool = False
) -> Package:
    """Returns the user's package: a folder that Python can import, or one module, with what it
    needs.

    That are the packages of its requirements.txt or pyproject.toml, or those that it imports.
    `most_mb`: its largest size, in 10^6 bytes; `include`: patterns of files to ship although git
    does not track them; `force`: packages that no index has are left out. Raises UserError if
    `address` is neither, or for what must not or cannot be shipped.
    """
    path = expanded(address).resolve()
    # What Python imports, one module or the __init__.py of a folder, and whether it may be shipped.
    is_module = path.suffix == ".py" and path.is_file()
    name = path.stem if is_module else path.name
    imported = path.name if is_module else f"{path.name}/__init__.py"
    if not (path.parent / imported).is_file():
        advice = "such as my_models with an __init__.py, or one module, such as mine.py"
        if inside := sorted(path.glob("*/__init__.py")):
            advice = f"did you mean {address}/{inside[0].parent.name}?"
        raise UserError(f"package={address}: must be a folder that Python can import: {advice}")
    if not re.fullmatch(r"[A-Za-z](\w*[A-Za-z0-9])?", name, re.ASCII):
        raise UserError(
            f"package={address}: pip takes letters, digits and _ between them: rename it, such as"
            " my_models"
        )
    if name in ("trainer", "deploy") or canonical(name) == canonical(TRAINER):
        raise UserError(f"package={address}: {name} is a name of this project: rename your package")
    sources = user_sources(path, most_mb, include=include)
    if imported not in sources.files:
        raise UserError(
            f"package={address}: git or .gcloudignore ignores its __init__.py: nothing would go"
            " along"
        )
    # What pip installs with it.
    tops = sorted({file.partition("/")[0] for file in sources.files})
    requires = listed_requirements(path.parent if is_module else path)
    about = f"ships {name}: {sources}"
    if requires is None:
        present = {Path(top).stem for top in tops}
        requires = requirements_of(sources.imports, present, trains=True, force=force)
        about += f"; pip installs {' '.join(requires)} for it" if requires else ""
    for line in requires:
        check_requirement(line)
    # The data that its sources name, and the setup.py of its wheel.
    data = named_data(sources, Path.cwd(), most_mb, force=force)
    about += f"; its folder there has {', '.join(sorted(data))}" if data else ""
    modules = [Path(top).stem for top in tops if top.endswith(".py")]
    packages = [top for top in tops if not top.endswith(".py")]
    setup = _USER_SETUP.format(
        name=canonical(name), modules=modules, packages=packages, requires=requires
    )
    files: dict[str, bytes | Path] = {"setup.py": setup.encode(), **sources.files}
    return Package(name, "0", files, about, data, requires)


def packages_with(
    folder: str, most_mb: float = MOST_MB, include: Sequence[str] = (), *, force: bool = False
) -> list[Package]:
    """Returns the packages of a job: that in `folder`, unless this is "", and the trainer."""
    own = [user_package(folder, most_mb, include, force=force)] if folder else []
    return [*own, trainer_package()]


def write_copy(package: Package, folder: Path) -> None:
    """Copies the package's sources, and nothing else, into `folder`.

    Raises UserError if they changed since they were hashed.
    """
    for name, content in package.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(content) as source, path.open("wb") as file:
            shutil.copyfileobj(source, file)
        path.chmod(0o644)  # whatever the umask: the wheel stores it
    copied = dataclasses.replace(package, files={name: folder / name for name in package.files})
    if copied.digest != package.digest:
        raise UserError(
            f"{package.name}: its files changed while they were copied: run the same command again"
        )
