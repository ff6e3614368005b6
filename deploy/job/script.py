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
from deploy.packaging.image_choice import IN_JOB, installs
from deploy.packaging.packages import CodeArchive, Package, write_copy
from deploy.packaging.sources import MB, REQUIREMENT_FILES, Sources, script_sources, user_sources
from deploy.platform.local import kill_group
from deploy.tiers.tier import load_tier
from trainer.base.errors import UserError
from trainer.base.script import calls_fit
from trainer.base.settings.fields import nearest, nearest_file, write_flags
from trainer.base.settings.request import LAUNCH_SETTINGS, OF_SCRIPT
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
        by_option = self.options.as_is or self.options.module
        why = ", as it is" if by_option else ", as it is: it calls no fit of Keras"
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
        values = {name: value for name, value in self.values.items() if name not in names}
        return self.replace(values=values)

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
        options = self.options
        limits = (options.max_package_mb, options.include)
        if self.command[0] == "-m":
            return user_sources(self.folder, *limits)
        place = (self.folder, self.command[0], self.words, *limits)
        sources = script_sources(*place, force=options.force)
        tops = {name.partition("/")[0] for name in sources.files}
        if self.launched and {"trainer", "trainer.py"} & tops:
            raise UserError(
                f"script={self.name}: trainer beside it would hide this package: rename it, or use"
                " --as_is"
            )
        if self.launched and not options.no_check and (opened := self._opened(sources)):
            say(f"{self.name} opens {', '.join(opened)}, which goes along")
            return script_sources(*place, opened, force=options.force)
        return sources

    @cached_property
    def files(self) -> dict[str, Path]:
        """Returns the `sources`, and of a module also the requirements.txt of its package."""
        files = {**self.sources.files}
        listed = self._home / REQUIREMENT_FILES[0]
        if listed.is_file():
            if listed not in files.values():
                user_sources(listed)  # refuses credentials in it
            files[REQUIREMENT_FILES[0]] = listed
        return files

    @property
    def _home(self) -> Path:
        """Returns the folder that may list the requirements: of a module, that of its package."""
        beside = self.command[0] == "-m" and listed_requirements(self.folder) is None
        return self.folder.parent if beside else self.folder

    @property
    def listed(self) -> list[str] | None:
        """Returns the requirements that a file of the user's lists, None without one.

        Raises UserError for bad ones.
        """
        lines = listed_requirements(self._home)
        for line in lines or () if self.launched else ():
            check_requirement(line)
        return lines

    def requirements(self, gpus: int, *, plain: bool, sources: Sources | None = None) -> list[str]:
        """Returns what pip installs: what a file lists or, in a `plain` image, what is imported.

        Raises UserError for imports that no package index has.
        """
        sources = sources or self.sources
        listed = self.listed
        if listed is not None:
            return listed
        if not plain:
            return []
        # Any part of a path may be a module that the code imports.
        parts = [part for name in sources.files for part in name.split("/")]
        present = {part.partition(".")[0] for part in parts}
        force = self.options.force
        return requirements_of(
            sources.imports, present, trains=self.launched, gpus=gpus, force=force
        )

    def _opened(self, sources: Sources) -> list[str]:
        """Runs the script with only `sources` to its first `fit`, and returns what else it opens.

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
        # The modules that are installed here and that a plain image would lack.
        image = getattr(self.options, "image", "")  # a run on this machine has none
        plain = not image or installs(image)
        lines = self.requirements(0, plain=True, sources=sources) if plain else []
        present = [Path(name).parts[0].removesuffix(".py") for name in sources.files]
        hidden = hidden_modules([*INSTALLED, *lines], present)
        with tempfile.TemporaryDirectory() as scratch:
            # A copy of what goes along, and a plan for the process that runs the script in it.
            work = Path(scratch, "work")
            report = Path(scratch, "report")
            write_copy(Package(self.subject, "0", sources.files), work)
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
            # The variables of the job, without its GPUs, and with a word in place of each secret.
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
            text = Path(scratch, "stderr").read_text(encoding="utf-8", errors="replace")
            last_words = [*text.splitlines(), ""][-2:][0]
            entries = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        # What the process reported: a file that the script opened, a line of the proof, an error.
        opened = [entry["opened"] for entry in entries if "opened" in entry]
        for entry in entries:
            if "said" in entry:
                say(f"{self.name}: {entry['said']}")
            if "refused" in entry:
                raise UserError(f"script={self.name}: {entry['refused']}")
            if "error" in entry:
                error = entry["error"].replace(f"{work}/", "")
                self._refuse_missing(entry["missing"], error, sources, hidden)
                ended = f"it ended here before it called fit, by {error}"
                ended += nearest_file(error, self.folder)
                if error.startswith("SystemExit") and last_words:
                    ended = f"{ended} ({last_words})"
                # What only this check forbids, or this machine lacks, need not fail in the job.
                if not (entry["forbidden"] or entry["missing"] or "/gcs/" in error):
                    raise UserError(
                        f"script={self.name}: {ended}: so would its job: mend it, or use --no_check"
                    )
                cause = f": {entry['missing']} is not installed here" if entry["missing"] else ""
                say(f"{self.name}: {ended}{cause}: it is not checked further")
        return opened

    def _proof(self, scratch: str, replicas: int) -> dict[str, Any]:
        """Returns the settings with which the step of the script is proved here."""
        of_job = ("job_dir", "expect_devices", "strategy", "track", "cache_dir", "profile_steps")
        # As many devices as the tier has, up to eight: does the batch divide?
        local = {"job_dir": f"{scratch}/proof", "replicas": replicas if replicas <= 8 else 2}
        return {**self.without(*of_job).values, **local}

    def _refuse_missing(
        self, module: str, error: str, sources: Sources, hidden: Mapping[str, str]
    ) -> None:
        """Raises UserError if an error comes from what exists here and the job would lack."""
        top = module.partition(".")[0]
        path = module.replace(".", "/")
        if top in hidden:
            needed = self.listed or self.requirements(0, plain=True, sources=sources)
            lines = [*needed, hidden[top]]
            raise UserError(
                f"script={self.name}: it imports {module}, which the job would not have: write"
                f" {REQUIREMENT_FILES[0]} beside it with the lines {', '.join(lines)}"
            )
        # Without a module the error may name a file, as any of its words.
        names = [f"{path}.py", path] if module else re.findall(r"[^\s'\",;:()\[\]]+", error)
        for name in names:
            path_here = (self.folder / name).resolve()
            inner = os.path.relpath(path_here, self.folder)
            goes_along = any(f"{file}/".startswith(f"{inner}/") for file in sources.files)
            if path_here.exists() and not goes_along and not inner.startswith("."):
                raise UserError(
                    f"script={self.name}: it needs {inner}, which does not go along ({error}): add"
                    f" --include={inner}"
                )

    def package(self) -> CodeArchive:
        """Returns the archive that a job needs: what goes along and, as it is, what runs it.

        Raises UserError for files that must not be shipped.
        """
        files: dict[str, bytes | Path] = {f"code/{name}": path for name, path in self.files.items()}
        if not self.launched:
            for path in sorted(IN_JOB.rglob("*.py")):
                files[f"ours/in_job/{path.relative_to(IN_JOB).as_posix()}"] = path
            files |= {f"ours/{name}": IN_JOB.parents[1] / name for name in _OF_TRAINER}
            files["ours/__main__.py"] = _MAIN
        # What is shipped, in words: each file beside the script, each folder with its count.
        tops = Counter(name.partition("/")[0] + "/" * ("/" in name) for name in self.sources.files)
        parts = []
        for top, count in sorted(tops.items()):
            parts.append(f"{top} ({count})" if top.endswith("/") else top)
        return CodeArchive(self.subject, "0", files, f"ships {', '.join(parts)}: {self.sources}")


def read_script(options: CodeOptions, words: Sequence[str], values: Mapping[str, Any]) -> Script:
    """Returns the script of `--script` or `--module`, with the trainer's settings `values`.

    Raises UserError if there is none to run, and for settings that it does not have.
    """
    if options.script and options.module:
        raise UserError("--script and --module contradict each other: drop one of them")
    if options.as_is and options.launch:
        raise UserError("--as_is and --launch contradict each other: drop one of them")
    # A file, whose folder goes along; or a module, with the package that has it.
    if options.script:
        if options.package:
            raise UserError(
                "--script and --package contradict each other: what the script needs goes along:"
                " drop --package"
            )
        path = expanded(options.script)
        folder = expanded(options.script).parent.resolve()
        if not path.is_file() or path.suffix != ".py":
            hint = nearest(path.name, [file.name for file in folder.glob("*.py")])
            raise UserError(
                f"script={options.script}: there is no such Python file{hint} give the path of one,"
                " ending in .py"
            )
        launched = options.launch or (not options.as_is and calls_fit(folder, path.name))
        script = Script(options, folder, (path.name,), tuple(words), values, launched)
    else:
        if options.launch:
            raise UserError("--launch is for a file: name it by --script=FILE")
        top, *inner = options.module.split(".")
        folder = expanded(options.package or top).resolve()
        path = folder.joinpath(*inner)
        programs = [path / "__main__.py", *([path.with_suffix(".py")] if inner else [])]
        if folder.name != top or not any(program.is_file() for program in programs):
            raise UserError(
                f"module={options.module}: there is no such program in {folder}: name it as `python"
                " -m` takes it, as my.task, in a folder here or in that of --package; a file is"
                " --script="
            )
        script = Script(options, folder, ("-m", options.module), tuple(words), values)
    # The trainer's settings that apply: of a script that runs as it is, the job directory alone.
    allowed = {"job_dir", *(LAUNCH_SETTINGS if script.launched else ())}
    if refused := sorted(values.keys() - allowed):
        kind = "a script" if script.launched else "a script that runs as it is"
        raise UserError(
            f"{refused[0]} is no setting of {kind}: {OF_SCRIPT}, and its arguments follow --"
        )
    return script
