"""Describes a training script of the user's own: `--script=train.py`, `--module=`.

One that calls Keras's `fit` is trained by `trainer.launch`, and takes its settings; another runs as
it is. A Script takes the place of the trainer's Overrides, but nothing in it is resolved for a
tier.
"""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from deploy.base.console import say
from deploy.job.options import CodeOptions
from deploy.packaging import first_fit
from deploy.packaging.distributions import (
    INSTALLED,
    check_requirement,
    hidden_modules,
    listed_requirements,
    requirements_of,
)
from deploy.packaging.images import IN_JOB, installs
from deploy.packaging.packages import CodeArchive, Package, write_copy
from deploy.packaging.sources import MB, REQUIREMENT_FILES, Sources, script_sources, user_sources
from deploy.platform.local import kill_group
from deploy.tiers.tier import load_tier
from trainer.base.errors import UserError
from trainer.base.script import calls_fit
from trainer.base.settings.fields import nearest, write_flags
from trainer.base.settings.request import LAUNCH_SETTINGS
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import expanded

# What `deploy.in_job.script_worker`, which runs a script as it is, imports from outside its own
# folder.
_OF_TRAINER = ("trainer/__init__.py", "trainer/base/__init__.py", "trainer/base/limit_watch.py")
_MAIN = b"import sys\n\nfrom in_job.script_worker import main\n\nsys.exit(main())\n"
# Variables that a job has.
_OF_VERTEX = ("AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")
CHECK_S = 60.0  # how long a script may take to its first `fit` before it is sent unchecked


@dataclasses.dataclass(frozen=True)
class Script:
    """Holds a script, or a module that runs as a program, with its arguments.

    `options`: those of its job; `folder`: that of the script, or the module's package; `command`:
        Python's arguments before those of the script; `words`: the script's arguments; `settings`:
        those of `trainer.launch`, or job_dir alone; `launched`: whether `trainer.launch` runs it.
    """

    options: CodeOptions
    folder: Path
    command: tuple[str, ...]
    words: tuple[str, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    launched: bool = False

    @property
    def name(self) -> str:
        """Returns the script or module as the user wrote it."""
        return self.options.script or self.options.module

    @property
    def job_dir(self) -> str:
        """Returns the job directory that was given."""
        return str(self.values.get("job_dir", ""))

    @property
    def subject(self) -> str:
        """Returns the text that begins the names of its jobs."""
        name = Path(self.name).name.removesuffix(".py").lower()
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "script"

    @property
    def about(self) -> str:
        """Returns a line on what runs, and for which reason."""
        command = ["python", *self.command, *self.words]
        asked = self.options.as_is or self.options.module
        why = ", as it is" if asked else ", as it is: it calls no fit of Keras"
        if self.launched:
            command = ["python", "-m", "trainer.launch", *self.launch_arguments()]
            calls = ": it calls fit (--as_is runs it as it is)"
            why = ": --launch" if self.options.launch else calls
        return f"runs {shlex.join(command)}{why}"

    @property
    def config(self) -> TrainConfig:
        """Returns the settings with which `trainer.launch` opens its run."""
        return TrainConfig(model=self.command[0], data=self.command[0], **self.values)

    def replace(self, **values: Any) -> "Script":
        """Returns the script with these fields replaced."""
        return dataclasses.replace(self, **values) if values else self

    def without(self, *names: str) -> "Script":
        """Returns the script without these settings."""
        return self.replace(
            values={name: value for name, value in self.values.items() if name not in names}
        )

    def arguments(self) -> list[str]:
        """Returns what identifies the script, as flags of a command."""
        return [
            f"--script={self.name}",
            f"--arguments={shlex.join(self.words)}",
            *write_flags(self.without("job_dir").values),
        ]

    def launch_arguments(self) -> list[str]:
        """Returns the arguments of `trainer.launch`, whose job directory is that of the job."""
        flags = write_flags(self.without("job_dir", "expect_devices").values)
        return [*flags, *["--launch"] * self.options.launch, *self.command, *self.words]

    @cached_property
    def sources(self) -> Sources:
        """Returns the files that go along, by their paths from the folder in which the script runs.

        Raises UserError for files that must not be shipped, and for what is missing when the script
        is tried.
        """
        asked = self.options
        limits = (asked.max_package_mb, asked.include)
        if self.command[0] == "-m":
            return user_sources(self.folder, *limits)
        given = (self.folder, self.command[0], self.words, *limits)
        found = script_sources(*given, force=asked.force)
        if self.launched and {"trainer", "trainer.py"} & {
            name.partition("/")[0] for name in found.files
        }:
            raise UserError(
                f"script={self.name}: trainer beside it would hide this package: rename it, or use"
                " --as_is"
            )
        if self.launched and not asked.no_check and (opened := self._opened(found)):
            say(f"{self.name} opens {', '.join(opened)}, which goes along")
            return script_sources(*given, opened, force=asked.force)
        return found

    @cached_property
    def files(self) -> dict[str, Path]:
        """Returns the `sources`; of a module also the requirements.txt in its package, or beside
        that, on top."""
        files = {**self.sources.files}
        listed = self._home / REQUIREMENT_FILES[0]
        if listed.is_file():
            if listed not in files.values():
                user_sources(listed)  # refuses credentials in it
            files[REQUIREMENT_FILES[0]] = listed
        return files

    @property
    def _home(self) -> Path:
        """Returns the folder that may list what the script needs: of a module its package, or the
        folder of that."""
        beside = self.command[0] == "-m" and listed_requirements(self.folder) is None
        return self.folder.parent if beside else self.folder

    @property
    def listed(self) -> list[str] | None:
        """Returns the requirements that a file of the user's lists, None without one. Raises
        UserError for bad ones."""
        lines = listed_requirements(self._home)
        for line in lines or () if self.launched else ():
            check_requirement(line)
        return lines

    def requirements(self, gpus: int, *, plain: bool, found: Sources | None = None) -> list[str]:
        """Returns what pip installs for the script: what a file lists or, in a `plain` image, what
        it imports.

        Raises UserError for imports that no package index has.
        """
        found = found or self.sources
        listed = self.listed
        if listed is not None:
            return listed
        present = {part.partition(".")[0] for name in found.files for part in name.split("/")}
        force = self.options.force
        return (
            requirements_of(found.imports, present, trains=self.launched, gpus=gpus, force=force)
            if plain
            else []
        )

    def _opened(self, found: Sources) -> list[str]:
        """Runs the script, with what was found of it, to its first `fit`; returns what else it
        opens beside itself.

        Raises UserError for a module or a file that the job would not have.
        """
        # Several paid replicas: their number must not change the result.
        on_vertex = getattr(self.options, "on", "vertex") == "vertex"
        tiers = getattr(self.options, "tiers", ()) if on_vertex else ()
        replicas = max((load_tier(name).facts.devices for name in tiers), default=1)
        proves = replicas > 1 and "virtual_replicas" not in self.values
        proved = f", and proves its step for {replicas} replicas" if proves else ""
        say(
            f"tries {self.name} here up to its first fit, with only what goes along{proved}:"
            f" {CHECK_S:.0f} s at most (--no_check leaves that out)"
        )
        image = getattr(self.options, "image", "")  # a run on this machine has none
        plain = not image or installs(image)
        lines = self.requirements(0, plain=True, found=found) if plain else []
        hidden = hidden_modules(
            [*INSTALLED, *lines], [Path(name).parts[0].removesuffix(".py") for name in found.files]
        )
        with tempfile.TemporaryDirectory() as scratch:
            work = Path(scratch, "work")
            report = Path(scratch, "report")
            write_copy(Package(self.subject, "0", found.files), work)
            report.touch()
            Path(scratch, "plan").write_text(
                json.dumps(
                    {
                        "script": self.command[0],
                        "arguments": self.words,
                        "origin": str(self.folder),
                        "hidden": [*hidden] if plain else [],
                        "most_bytes": self.options.max_package_mb * MB,
                        "proof": self._proof(scratch, replicas) if proves else {},
                        "trainer": str(IN_JOB.parents[1]),
                    }
                )
            )
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            variables |= {name: f"{scratch}/{name}" for name in _OF_VERTEX}
            variables |= {
                **getattr(self.options, "env", {}),
                **dict.fromkeys(getattr(self.options, "secret", ()), "secret"),
            }
            variables |= {
                "TMPDIR": scratch,
                "PYTHONDONTWRITEBYTECODE": "1",
                "CUDA_VISIBLE_DEVICES": "-1",
                "KERAS_BACKEND": "tensorflow",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            command = [sys.executable, str(first_fit.__file__), f"{scratch}/plan", str(report)]
            with Path(scratch, "stderr").open("wb") as stderr:
                process = subprocess.Popen(
                    command,
                    cwd=work,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            try:
                process.wait(CHECK_S)
            except subprocess.TimeoutExpired:
                say(f"{self.name} did not reach fit in {CHECK_S:.0f} s: it is not checked further")
            finally:
                kill_group(process)
                process.wait()
            last = [
                *Path(scratch, "stderr").read_text(encoding="utf-8", errors="replace").splitlines(),
                "",
            ][-2:][0]
            told = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        opened = [line["opened"] for line in told if "opened" in line]
        for line in told:
            if "said" in line:
                say(f"{self.name}: {line['said']}")
            if "refused" in line:
                raise UserError(f"script={self.name}: {line['refused']}")
            if "error" in line:
                error = line["error"].replace(f"{work}/", "")
                self._refuse_missing(line["missing"], error, found, hidden)
                ended = f"it ended here before it called fit, by {error}"
                if error.startswith("SystemExit") and last:
                    ended = f"{ended} ({last})"
                if not (line["forbidden"] or line["missing"]):
                    raise UserError(
                        f"script={self.name}: {ended}: so would its job: mend it, or use --no_check"
                    )
                here = f": {line['missing']} is not installed here" if line["missing"] else ""
                say(f"{self.name}: {ended}{here}: it is not checked further")
        return opened

    def _proof(self, scratch: str, replicas: int) -> dict[str, Any]:
        """Returns the settings with which the step of the script is proved here."""
        elsewhere = ("job_dir", "expect_devices", "strategy", "track", "cache_dir", "profile_steps")
        # As many devices as the tier has, up to eight: does the batch divide?
        here = {"job_dir": f"{scratch}/proof", "replicas": replicas if replicas <= 8 else 2}
        return {**self.without(*elsewhere).values, **here}

    def _refuse_missing(
        self, module: str, error: str, found: Sources, hidden: Mapping[str, str]
    ) -> None:
        """Raises UserError if an error comes from a module or a file that exists here and that the
        job would lack."""
        top = module.partition(".")[0]
        path = module.replace(".", "/")
        if top in hidden:
            lines = [*(self.listed or self.requirements(0, plain=True, found=found)), hidden[top]]
            raise UserError(
                f"script={self.name}: it imports {module}, which the job would not have: write"
                f" {REQUIREMENT_FILES[0]} beside it with the lines {', '.join(lines)}"
            )
        names = [f"{path}.py", path] if module else re.findall(r"[^\s'\",;:()\[\]]+", error)
        for name in names:
            here = (self.folder / name).resolve()
            inner = os.path.relpath(here, self.folder)
            stays = here.exists() and not any(
                f"{file}/".startswith(f"{inner}/") for file in found.files
            )
            if stays and not inner.startswith("."):
                raise UserError(
                    f"script={self.name}: it needs {inner}, which does not go along ({error}): add"
                    f" --include={inner}"
                )

    def package(self) -> CodeArchive:
        """Returns the archive that a job needs: what goes along with the script and, as it is, what
        runs it.

        Raises UserError for files that must not be shipped.
        """
        files: dict[str, bytes | Path] = {f"code/{name}": path for name, path in self.files.items()}
        if not self.launched:
            ours = {
                f"ours/in_job/{path.relative_to(IN_JOB).as_posix()}": path
                for path in sorted(IN_JOB.rglob("*.py"))
            }
            files |= ours | {f"ours/{name}": IN_JOB.parents[1] / name for name in _OF_TRAINER}
            files["ours/__main__.py"] = _MAIN
        tops = Counter(name.partition("/")[0] + "/" * ("/" in name) for name in self.sources.files)
        parts = [
            f"{top} ({count})" if top.endswith("/") else top for top, count in sorted(tops.items())
        ]
        return CodeArchive(self.subject, "0", files, f"ships {', '.join(parts)}: {self.sources}")


def read_script(asked: CodeOptions, words: Sequence[str], values: Mapping[str, Any]) -> Script:
    """Returns the script of `--script` or `--module`, with the trainer's settings `values`.

    Raises UserError if there is none to run, and for settings that it does not have.
    """
    if asked.script and asked.module:
        raise UserError("--script and --module contradict each other: drop one of them")
    if asked.as_is and asked.launch:
        raise UserError("--as_is and --launch contradict each other: drop one of them")
    if asked.script:
        if asked.package:
            raise UserError(
                "--script and --package contradict each other: what the script needs goes along:"
                " drop --package"
            )
        path = expanded(asked.script)
        folder = expanded(asked.script).parent.resolve()
        if not path.is_file() or path.suffix != ".py":
            hint = nearest(path.name, [file.name for file in folder.glob("*.py")])
            raise UserError(
                f"script={asked.script}: there is no such Python file{hint} give the path of one,"
                " ending in .py"
            )
        launched = asked.launch or (not asked.as_is and calls_fit(folder, path.name))
        script = Script(asked, folder, (path.name,), tuple(words), values, launched)
    else:
        if asked.launch:
            raise UserError("--launch is for a file: name it by --script=FILE")
        top, *inner = asked.module.split(".")
        folder = expanded(asked.package or top).resolve()
        path = folder.joinpath(*inner)
        programs = [path / "__main__.py", *([path.with_suffix(".py")] if inner else [])]
        if folder.name != top or not any(program.is_file() for program in programs):
            raise UserError(
                f"module={asked.module}: there is no such program in {folder}: name it as `python"
                " -m` takes it, as my.task, in a folder here or in that of --package; a file is"
                " --script="
            )
        script = Script(asked, folder, ("-m", asked.module), tuple(words), values)
    if others := sorted(values.keys() - {"job_dir", *(LAUNCH_SETTINGS if script.launched else ())}):
        raise UserError(
            f"{others[0]} is a setting of this package's training, not of a script. The arguments"
            " of your script follow --"
        )
    return script
