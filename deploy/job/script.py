"""Describes a training script of the user's own, which runs instead of the trainer: `--script=train.py`, `--module=`.

A Script takes the place of the trainer's Overrides, but nothing in it is resolved for a tier: it runs as it is.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.packaging.images import IN_JOB, requirements
from deploy.packaging.packages import DIST, CodeArchive, Package
from deploy.packaging.sources import DISTRIBUTIONS, MOST_MB, missing_imports, user_sources
from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.storage import expanded

# What `deploy.in_job.script_worker`, which runs a script, imports from outside its own folder.
_OF_TRAINER = ("trainer/__init__.py", "trainer/base/__init__.py", "trainer/base/limit_watch.py")
_MAIN = b"import sys\n\nfrom in_job.script_worker import main\n\nsys.exit(main())\n"


@dataclasses.dataclass(frozen=True)
class Script:
    """Holds a script, or a module that runs as a program, with its arguments.

    `folder`: what is shipped with the job; `command`: Python's arguments before those of the script.
    """

    name: str  # as the user wrote it
    folder: Path
    command: tuple[str, ...]
    words: tuple[str, ...] = ()  # the script's arguments
    job_dir: str = ""

    @property
    def subject(self) -> str:
        """Returns the text that begins the names of its jobs."""
        return re.sub(r"[^a-z0-9]+", "-", Path(self.name).name.removesuffix(".py").lower()).strip("-") or "script"

    @property
    def values(self) -> Mapping[str, Any]:
        """Returns the only trainer setting that a script can have, job_dir, if it was given."""
        return {"job_dir": self.job_dir} if self.job_dir else {}

    def replace(self, **values: Any) -> "Script":
        """Returns the script with these fields replaced."""
        return dataclasses.replace(self, **values)

    def arguments(self) -> list[str]:
        """Returns what identifies the script, as flags of a command."""
        return [f"--script={self.name}", f"--arguments={shlex.join(self.words)}"]

    def package(self, most_mb: float = MOST_MB, include: Sequence[str] = ()) -> CodeArchive:
        """Returns the archive that a job needs: the script's folder, and the programs that run the script.

        Raises UserError for files that must not be shipped, as `--package` does.
        """
        sources = user_sources(self.folder, most_mb, (Path("runs").resolve(), DIST.resolve()), include)
        as_module = self.command[0] == "-m"  # then the folder is a package, which keeps its name
        code = {name if as_module else name.partition("/")[2]: path for name, path in sources.files.items()}
        beside = self.folder.parent / "requirements.txt"
        listed = code.get(f"{self.folder.name}/requirements.txt" if as_module else "requirements.txt")
        if as_module and not listed and beside.is_file():
            user_sources(beside)  # refuses credentials in it
            listed = beside
        if listed:
            code["requirements.txt"] = listed
        if not as_module and self.command[0] not in code:
            raise UserError(
                f"script={self.name}: it would not be shipped: .gitignore or .gcloudignore names it, or it is a link "
                "out of its folder"
            )
        ours = {f"ours/in_job/{path.relative_to(IN_JOB).as_posix()}": path for path in sorted(IN_JOB.rglob("*.py"))}
        ours |= {f"ours/{name}": IN_JOB.parents[1] / name for name in _OF_TRAINER}
        files = {f"code/{name}": content for name, content in code.items()} | ours | {"ours/__main__.py": _MAIN}
        about = f"ships {self.folder.name}: {sources}; vertex_report.py"
        if listed:
            about += "; requirements.txt is installed at each start"
        return CodeArchive(self.subject, "0", files, about)

    def check_imports(self, package: Package, image: str, gpus: int) -> None:
        """Raises UserError for imports that a plain image lacks, where no requirements.txt installs them."""
        files = {name.partition("/")[2]: path for name, path in package.files.items()
                 if name.startswith("code/") and isinstance(path, Path)}  # fmt: skip
        path = self.command[-1].replace(".", "/") if self.command[0] == "-m" else ""
        start = next((name for name in (f"{path}.py", f"{path}/__main__.py") if name in files), self.command[-1])
        missing = missing_imports(files, start)
        about = ", ".join(f"{name.top} ({name.file}, line {name.line})" for name in missing[:5])
        tensorflow = requirements(gpus)[0]  # brings keras
        lines = {
            tensorflow if name.top in ("keras", "tensorflow") else DISTRIBUTIONS.get(name.top, name.top)
            for name in missing
        }
        if missing:
            raise UserError(
                f"script={self.name}: {image} has no {about}, and there is no requirements.txt: write one "
                f"beside the script with the lines {', '.join(sorted(lines))}, or use --force"
            )


def read_script(script: str, module: str, package: str, words: Sequence[str], job_dir: str = "") -> Script:
    """Returns the script of `--script` or `--module`. Raises UserError if there is none to run."""
    if script and module:
        raise UserError("--script and --module contradict each other: drop one of them")
    if script:
        if package:
            raise UserError(
                "--script and --package contradict each other: the script's folder goes along: drop --package"
            )
        path, folder = expanded(script), expanded(script).parent.resolve()
        if not path.is_file() or path.suffix != ".py":
            hint = nearest(path.name, [file.name for file in folder.glob("*.py")])
            raise UserError(f"script={script}: there is no such Python file{hint} give the path of one, ending in .py")
        return Script(script, folder, (path.name,), tuple(words), job_dir)
    top, *inner = module.split(".")
    folder = expanded(package or top).resolve()
    path = folder.joinpath(*inner)
    programs = [path / "__main__.py", *([path.with_suffix(".py")] if inner else [])]
    if folder.name != top or not any(program.is_file() for program in programs):
        raise UserError(
            f"module={module}: there is no such program in {folder}: name it as `python -m` takes it, as my.task, in a "
            "folder here or in that of --package; a file is --script="
        )
    return Script(module, folder, ("-m", module), tuple(words), job_dir)
