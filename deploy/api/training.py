"""Trains on this machine, from a program or a notebook, by the process that `python -m trainer.task` is.

Not in the caller's own process: a distribution strategy has to be made before TensorFlow first uses its devices, which
a notebook has often done already.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from deploy.api.call_arguments import FlagValue, as_arguments
from deploy.api.jobs import RunResult
from deploy.tiers.output import run_program
from trainer.base.errors import UserError
from trainer.base.run_files.records import RESULT
from trainer.base.storage import local_path

_STEP = re.compile(r"step ([\d,]+)/([\d,]+)")  # begins a status line


def train(
    model: str = "", data: str = "", settings: Mapping[str, FlagValue] | None = None, *, job_dir: str, recipe: str = "",
    stream: TextIO | None = None, progress: bool = False,
) -> RunResult:  # fmt: skip
    """Trains a model, "module:function" as `data`, and returns its result; the same call again resumes.

    `settings`: of the trainer, as epochs; `job_dir`: a folder of this machine. The log goes to `stream`; `progress`
    shows a bar in a notebook. Ctrl-C saves the state. Raises UserError for what the trainer refuses, PlatformFault for
    a run that failed.
    """
    if not job_dir or (settings or {}).keys() & {"print_config", "help"}:  # which only print
        raise UserError("train needs a job_dir, and takes no print_config or help in settings")
    named = {"recipe": recipe, "model": model, "data": data, "job_dir": job_dir}
    words, folder = as_arguments((), named, settings), local_path(job_dir, "job_dir")
    bar = _notebook_bar() if progress else None

    def show(line: str) -> None:
        if stream:
            print(line, file=stream, flush=True)
        if bar and (step := _STEP.match(line)):
            bar(*(int(count.replace(",", "")) for count in step.groups()))

    run_program("trainer.task", words, show)
    return RunResult.read((folder / RESULT).read_text(encoding="utf-8"), job_dir)


def _notebook_bar() -> Callable[[int, int], None] | None:
    """Returns what shows a step of all in a notebook; None elsewhere."""
    if "ipykernel" not in sys.modules:
        return None
    display: Any = importlib.import_module("IPython.display")

    def html(step: int, total: int) -> Any:
        return display.HTML(f'<progress value="{step}" max="{total}"></progress> step {step:,} of {total:,}')

    handle = display.display(html(0, 1), display_id=True)
    return lambda step, total: handle.update(html(step, total))
