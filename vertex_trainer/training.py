"""Trains from a program or a notebook: on this machine, or as a job that is followed to its end.

On this machine `python -m trainer.task` runs as a process of its own, not in the caller's: a
distribution strategy has to be made before TensorFlow first uses its devices, and a notebook has
often used them already. A keras.Model alone is trained in the caller's process, by the devices that
TensorFlow has there.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from deploy.api.request import Value, call_verb
from deploy.api.submit import USAGE, SubmitOptions, prepare_submission
from deploy.base.console import printed_on, run_program, say
from deploy.job.vertex_job import RunResult, load_model
from deploy.platform.vertex_api import WatchLine, console_page
from deploy.report.collection import fetched
from deploy.report.run_reader import billed
from trainer.base.errors import UserError
from trainer.base.log import hidden, start_logging
from trainer.base.run_files.job_files import RESULT
from trainer.base.settings.fields import coerce_all, fields_of, nearest
from trainer.base.settings.request import LAUNCH_SETTINGS, Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import local_path

_STEP = re.compile(r"(step|epoch) +([\d,]+)(?:/| of )([\d,]+)")  # begins a line of progress


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Holds a finished training.

    `history`: the values of each loss and metric by epoch, as Keras's History.history.

    `cost`: USD that its jobs cost, 0 on this machine, None if unknown; `url`: the job's page, or
        the local folder.
    """

    history: Mapping[str, Sequence[float | None]] = dataclasses.field(repr=False)
    result: RunResult
    cost: float | None
    url: str
    output: str  # its job directory

    @property
    def model(self) -> Any:
        """Returns the trained keras.Model, which Keras loads without the code of this package."""
        return load_model(self.output)


def fit(
    model: Any = None,
    data: Any = None,
    y: Any = None,
    *,
    on: str | None = None,
    job_dir: str | None = None,
    progress: bool = True,
    stream: TextIO | None = None,
    **options: Any,
) -> Fitted:
    """Trains a model to the end, on this machine or on a tier, such as on="l4x4".

    `model` and `data`: "module:function"; `options`: settings of the trainer, such as epochs, and
    for a tier also fields of SubmitOptions, such as max_cost; None is as if it were not named.
    Unless `progress` is False, prints what will run, what it may cost, and its log, with a progress
    bar in a notebook. Asks to confirm a high cost, on a terminal or in a notebook. The same call
    again resumes the run, or returns its job; again=True sends another job.

    A compiled keras.Model as `model` is trained in this process, on all its GPUs: `data` and `y`
    are then the x and y of `keras.Model.fit`, and `options` its other arguments and flags of
    `trainer.launch`, such as replicas.

    Raises UserError, PlatformFault if the training fails, and KeyboardInterrupt after Ctrl-C, which
    leaves the job running.
    """
    if (keras := sys.modules.get("keras")) and isinstance(model, keras.Model):
        if on:
            raise UserError(
                f"on={on}: a model of this process stays in it: name functions, as 'mine:model', or"
                " submit a script with --script"
            )
        return _fit_here(
            model,
            {"x": data, "y": y},
            job_dir,
            options,
            stream or (sys.stdout if progress else None),
        )
    if (
        not isinstance(model, str | None)
        or not isinstance(data, str | os.PathLike | None)
        or y is not None
    ):
        raise UserError(
            "model and data are names, such as 'mine:model', which the training imports itself, or"
            " a compiled keras.Model and the x and y of its fit"
        )
    keywords = {"model": model, "data": data, "job_dir": job_dir, **options}
    # On this machine, in a folder that the settings name unless the caller does.
    if on is None:
        log = stream or (sys.stdout if progress and "ipykernel" not in sys.modules else None)
        if job_options := sorted(fields_of(SubmitOptions).keys() & options.keys()):
            raise UserError(
                f"{job_options[0]} is for a job: name its tier, as on='l4x4', or leave it out"
            )
        overrides = _overrides(keywords)
        if "job_dir" not in overrides.values:
            digest = hashlib.sha256(" ".join(overrides.arguments()).encode()).hexdigest()
            overrides = overrides.replace(job_dir=f"runs/fit-{digest[:8]}")
        folder = overrides.values["job_dir"]
        result = _train(overrides, log, progress)
        return Fitted(result.history, result, 0.0, folder, folder)
    # On a tier, as a job that is followed to its end.
    advance = _progress_bar(progress)

    def show(line: WatchLine) -> None:
        if not advance(line.text):
            say(str(line))

    with printed_on(stream, command=progress):
        job = prepare_submission(call_verb(SubmitOptions, [on], keywords, None, USAGE))
        job.finish(show)
    result = job.result
    cost = billed(fetched(job.output, "job_dir"))[1]
    return Fitted(result.history, result, cost, console_page(job.name, job.gcp.project), job.output)


def train(
    model: str | None = None,
    data: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Value] | None = None,
    *,
    job_dir: str,
    recipe: str | None = None,
    stream: TextIO | None = None,
    progress: bool = False,
) -> RunResult:
    """Trains a model on this machine and returns its result; the same call again resumes.

    `model` and `data`: "module:function"; `settings`: the trainer's, such as epochs; `job_dir`: a
    local folder. Prints the log on `stream`; `progress` shows a bar in a notebook. Ctrl-C saves the
    state. Raises UserError for what the trainer refuses, PlatformFault for a run that failed.
    """
    keywords = {
        "recipe": recipe,
        "model": model,
        "data": data,
        "job_dir": job_dir,
        **(settings or {}),
    }
    return _train(_overrides(keywords), stream, progress)


def _fit_here(
    model: Any,
    data: Mapping[str, Any],
    job_dir: str | None,
    options: Mapping[str, Any],
    stream: TextIO | None,
) -> Fitted:
    """Trains a keras.Model in this process, in place, and returns how it went."""
    launched = importlib.import_module("trainer.run.launched")
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "fit of a model trains in the main thread alone: Ctrl-C would not reach it in"
            " another one"
        )
    # Which keywords are flags of `trainer.launch`, and which are arguments of `fit`.
    of_launch = fields_of(TrainConfig, *LAUNCH_SETTINGS)
    of_fit = {name: value for name, value in options.items() if name not in of_launch}
    accepted = inspect.signature(type(model).fit).parameters
    if unknown := sorted(of_fit.keys() - accepted.keys()):
        raise UserError(
            f"unknown keyword {unknown[0]}{nearest(unknown[0], [*accepted, *of_launch])} Keywords"
            " for a model of this process are the arguments of keras.Model.fit and the flags of"
            " python -m trainer.launch"
        )
    values = {name: value for name, value in options.items() if name in of_launch}
    settings = coerce_all(of_launch, values)
    # Without a folder one that the model, its weights and the settings name.
    if not job_dir:
        variables = [(variable.name, variable.shape) for variable in model.weights]
        digest = hashlib.sha256(repr((type(model).__name__, variables, settings)).encode())
        for weight in model.get_weights():
            digest.update(weight.tobytes())
        job_dir = f"runs/fit-{digest.hexdigest()[:8]}"
    name = type(model).__name__
    start_logging()
    output = contextlib.redirect_stdout(stream) if stream else contextlib.nullcontext()
    with output, hidden(not stream):
        launched.fit_model(
            model,
            TrainConfig(model=name, data=name, job_dir=job_dir, **settings),
            {**data, **of_fit},
        )
    result = RunResult.read(
        (local_path(job_dir, "job_dir") / RESULT).read_text(encoding="utf-8"), job_dir
    )
    return Fitted(result.history, result, 0.0, job_dir, job_dir)


def _overrides(keywords: Mapping[str, Value]) -> Overrides:
    """Returns the settings of a call that trains here.

    Raises UserError for what the trainer would refuse.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    overrides = Overrides.read(values)
    _ = overrides.config
    return overrides


def _train(overrides: Overrides, stream: TextIO | None, progress: bool) -> RunResult:
    """Trains in a process of its own, and returns its result."""
    folder = local_path(overrides.values["job_dir"], "job_dir")
    advance = _progress_bar(progress)

    def show(line: str) -> None:
        if stream:
            print(line, file=stream, flush=True)
        advance(line)

    run_program("trainer.task", overrides.arguments(), show)
    return RunResult.read((folder / RESULT).read_text(encoding="utf-8"), str(folder))


def _progress_bar(progress: bool) -> Callable[[str], bool]:
    """Returns a function that shows progress lines as a notebook's bar; False for others."""
    if not progress or "ipykernel" not in sys.modules:
        return lambda line: False
    display = importlib.import_module("IPython.display")
    handle = display.display(display.HTML("<progress></progress>"), display_id=True)

    def advance(line: str) -> bool:
        step = _STEP.match(line)
        if step:
            done, total = (int(count.replace(",", "")) for count in step.groups()[1:])
            bar = (
                f'<progress value="{done}" max="{total}"></progress> {step[1]} {done:,} of'
                f" {total:,}"
            )
            handle.update(display.HTML(bar))
        return step is not None

    return advance
