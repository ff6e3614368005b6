"""Prints the files that a value crosses, by tracing the real command: `python -m docs.walks`.

A file is crossed if one of its functions gets the value, alone or in an argument (a field, an item,
a part of a text), and hands it on: it returns it, or still runs when the walk ends.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / package}{os.sep}" for package in ("trainer", "deploy"))
STEP_SECONDS = 0.0123


class Walk(NamedTuple):
    """Describes a walk: the command, whose `value` is followed until `end`, "file:function", is
    called."""

    title: str
    value: Any
    module: str
    arguments: tuple[str, ...]
    end: str


class Finished(BaseException):
    """Ends the traced command."""


WALKS = (
    Walk(
        "a flag to the optimizer (`--learning_rate=0.0123`)",
        0.0123,
        "trainer.task",
        ("--recipe=wgan_gp_digits", "--learning_rate=0.0123", "--steps=1", "--job_dir=run"),
        "trainer/models/learning_rates.py:learning_rate",
    ),
    Walk(
        "a tier's name to the request (`deploy submit l4x4`)",
        "l4x4",
        "deploy.__main__",
        (
            "submit",
            "l4x4",
            "--recipe=wgan_gp_digits",
            "--bucket=gs://bucket",
            "--project=project",
            "--region=us-central1",
            "--dry_run",
            "--json",
        ),
        "deploy/job/job.py:request",
    ),
    Walk(
        "a number of stats.jsonl to a cell of the table (`step_seconds`)",
        STEP_SECONDS,
        "deploy.__main__",
        ("report", "run"),
        "deploy/report/measures.py:with_spread",
    ),
)


def crossed(walk: Walk) -> tuple[list[str], int, int]:
    """Runs the command in the current folder, with its output hidden.

    Returns the files in the order of the walk, how many more files get the value, but do not hand
    it on, and how many classes of ours hold it.
    """
    # of calls that got the value, in order; "" until it is known that they hand it on
    files: list[str] = []
    seen: set[str] = set()
    classes: set[type] = set()
    calls: list[tuple[FrameType, int]] = []  # those that run: frame, and its place in `files`

    def follow(frame: FrameType, event: str, result: object) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(PACKAGES):
            return
        name = Path(path).relative_to(ROOT).as_posix()
        if event == "return":
            if calls and calls[-1][0] is frame and _holds(result, walk.value):
                files[calls[-1][1]] = name
            if calls and calls[-1][0] is frame:
                calls.pop()
        elif any(_holds(argument, walk.value) for argument in frame.f_locals.values()):
            classes.update(
                type(argument)
                for argument in frame.f_locals.values()
                if _holds(argument, walk.value)
            )
            calls.append((frame, len(files)))
            files.append("")
            seen.add(name)
        if event == "call" and f"{name}:{frame.f_code.co_name}" == walk.end:
            for caller, place in calls:
                files[place] = Path(caller.f_code.co_filename).relative_to(ROOT).as_posix()
            raise Finished

    module = __import__(walk.module, fromlist=["main"])
    sys.argv = [walk.module, *walk.arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.setprofile(follow)
        try:
            module.main()
        except Finished:
            walked = dict.fromkeys(filter(None, files))
            ours = sum(kind.__module__.startswith(("trainer.", "deploy.")) for kind in classes)
            return [*walked], len(seen - walked.keys()), ours
        finally:
            sys.setprofile(None)
    raise AssertionError(f"{walk.end} was not called")


def _holds(argument: Any, value: Any, depth: int = 2) -> bool:
    """Returns whether an argument is the value, or holds it in a field or an item, `depth` levels
    down."""
    if isinstance(argument, str):
        return str(value) in argument
    if type(argument) is type(value):
        return bool(argument == value)
    return bool(depth) and any(_holds(part, value, depth - 1) for part in _parts(argument))


def _parts(argument: Any) -> Iterator[Any]:
    if isinstance(argument, Mapping):
        yield from argument.values()
    elif isinstance(argument, (list, tuple)):
        yield from argument
    elif type(argument).__module__.startswith(("trainer.", "deploy.", "argparse")):
        yield from getattr(argument, "__dict__", {}).values()


def _plant(folder: Path) -> None:
    """Writes a finished run whose steps took STEP_SECONDS."""
    folder.mkdir()
    run = {
        "config": {"model": "mlp", "global_batch_size": 8},
        "cluster": {"workers": 1, "replicas": 1},
        "devices": ["CPU:0"],
        "data": {"examples": 800, "examples_per_step": 8, "steps_per_epoch": 100},
        "total_steps": 60,
        "started": "2026-11-24T10:00:00Z",
    }
    reports = [
        {
            "kind": "report",
            "step": step,
            "epoch": step / 100,
            "seconds": step * STEP_SECONDS,
            "images_per_second": 8 / STEP_SECONDS,
            "step_seconds": STEP_SECONDS,
            "losses": {"loss": 1.0},
            "metrics": {},
            "memory_gib": 1.0,
        }
        for step in (20, 40, 60)
    ]
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "stats.jsonl").write_text("".join(f"{json.dumps(report)}\n" for report in reports))
    (folder / "result.json").write_text(
        json.dumps({"state": "done", "steps": 60, "wall_seconds": 2.0})
    )


def sentence(walk: Walk, files: Sequence[str], others: int, classes: int) -> str:
    """Returns a walk as a line of Markdown."""
    names = ", ".join(f"`{name}`" for name in files)
    counts = (
        f"{len(files)} files, {classes} classes; {others} more files get it, and do not hand it on"
    )
    return f"- From {walk.title}: {names}: {counts}."


def main() -> int:
    """Prints the walks; returns 0."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = folder  # without the plans that somebody has kept
        _plant(Path("run"))
        for walk in WALKS:
            print(sentence(walk, *crossed(walk)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
