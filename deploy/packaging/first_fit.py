"""Runs a script up to its first call of Keras's `fit`, in a folder that holds only what goes along
with its job.

`python first_fit.py PLAN REPORT`. PLAN is a file of JSON: "script" and "arguments"; "origin", the
folder of the script itself; "hidden", the modules that the job will not have; "most_bytes", the
largest file that is copied; "proof", the settings with which the trainer proves the step of that
call for several replicas, {} for no proof; "trainer", the folder of the trainer. What the script
opens beside itself, and is not here yet, is copied from there at that moment. REPORT gets a line of
JSON for each such file, for each line of the proof, and for an error, which says whether this check
forbade something before. It writes nothing outside of the folder above this one, and starts and
reaches no other program. Without a proof it needs the standard library and TensorFlow alone.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

# The events of Python's audit hooks: https://docs.python.org/3/library/audit_events.html
_READS = ("open", "os.listdir", "os.scandir", "sqlite3.connect")
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
_CHANGES = (
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "os.symlink",
    "os.link",
    "shutil.rmtree",
    "shutil.move",
)


class Hidden(MetaPathFinder):
    """Finds none of the modules that a job will not have."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a hidden module, else leaves it to the next finder."""
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class Lines(logging.Handler):
    """Writes lines of the log to the report."""

    def __init__(self, report: TextIO) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        print(json.dumps({"said": record.getMessage()}), file=self._report)


def main() -> None:
    """Runs the script, reports what came of it, and ends the process."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    work = Path.cwd()
    origin = Path(plan["origin"])
    report = open(sys.argv[2], "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (to the end of the process)
    busy = False  # while a file is copied
    forbidden = False  # whether the script tried what only this check forbids

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal busy, forbidden
        if event in _PROGRAMS or (
            event == "socket.connect" and not isinstance(arguments[1], str | bytes)
        ):
            forbidden = True
            raise PermissionError("the check before sending starts and reaches no other program")
        # It may read what is beside the script, which is copied first, and change only its copy.
        if busy or event not in (*_READS, *_CHANGES):
            return
        names = [part for part in arguments[:2] if isinstance(part, str | os.PathLike)]
        paths = [Path(os.path.abspath(name)) for name in names]
        writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        changes = writes or event in (*_CHANGES, "sqlite3.connect")
        for path in paths[:1] if event == "open" else paths:
            exists = path.exists()
            outside = not path.is_relative_to(work.parent) and path.parts[1:2] != ("dev",)
            if changes and outside and not (event == "os.mkdir" and exists):
                forbidden = True
                raise PermissionError(
                    f"the check before sending writes nothing outside of its copy: {path}"
                )
            source = origin / path.relative_to(work) if path.is_relative_to(work) else path
            if event in _READS and not writes and not exists and source.exists():
                busy = True
                print(json.dumps({"opened": path.relative_to(work).as_posix()}), file=report)
                copy(source, path)
                busy = False

    def copy(source: Path, path: Path) -> None:
        files = [file for file in (source, *source.rglob("*")) if file.is_file()]
        if sum(file.stat().st_size for file in files) <= plan["most_bytes"]:
            for file in files:
                target = path / file.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)

    def end() -> None:
        os._exit(0)  # whatever threads and handlers the script has left

    # Hides the modules that the job lacks, and watches what the script does from here on.
    sys.path[0] = str(work)
    sys.meta_path.insert(0, Hidden(plan["hidden"]))
    sys.addaudithook(watch)
    import keras
    import tensorflow as tf

    def naming(reads: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that reads files outside of Python, and shows their names first."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            for part in tf.nest.flatten((arguments, keywords)):
                watch("open", (part, "r", os.O_RDONLY))
            return reads(*arguments, **keywords)

        return call

    for holder, name in (
        (tf.io, "read_file"),
        (tf.io.gfile, "GFile"),
        (tf.data, "TextLineDataset"),
        (tf.data, "TFRecordDataset"),
        (tf.data, "FixedLengthRecordDataset"),
    ):
        setattr(holder, name, naming(getattr(holder, name)))
    # With a proof the trainer runs the script; otherwise its first call of fit ends the process.
    sys.argv = [plan["script"], *plan["arguments"]]
    if plan["proof"]:
        sys.path.append(plan["trainer"])
        from trainer.base.log import log
        from trainer.base.settings.train_config import TrainConfig
        from trainer.run.launched import prove_script

        log.addHandler(Lines(report))
    forbidden = False  # what importing TensorFlow tried does not count
    try:
        if plan["proof"]:
            names = dict.fromkeys(("model", "data"), plan["script"])
            prove_script(TrainConfig(**names, **plan["proof"]), plan["arguments"])
        else:
            keras.Model.fit = lambda *arguments, **keywords: end()
            runpy.run_path(plan["script"], run_name="__main__")
    except BaseException as error:
        if plan["proof"] and type(error).__name__ == "UserError":
            if error.__cause__ is None:
                print(json.dumps({"refused": str(error)}), file=report)
                end()
            else:
                error = error.__cause__  # what the script itself raised
        # The module that was missing, if that is the cause of the error.
        chain: BaseException | None = error
        missing = ""
        while chain and not missing:
            missing = (chain.name or "") if isinstance(chain, ModuleNotFoundError) else ""
            chain = chain.__cause__ or chain.__context__
        if not (isinstance(error, SystemExit) and not error.code):
            text = f"{type(error).__name__}: {error}"
            print(
                json.dumps({"error": text, "missing": missing, "forbidden": forbidden}), file=report
            )
    end()


if __name__ == "__main__":
    main()
