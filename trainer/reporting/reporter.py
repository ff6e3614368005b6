"""Reports a running job: log lines, progress bar, stats.jsonl, TensorBoard, tuning metric and
sample grids."""

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import tensorflow as tf

from trainer.base.log import ProgressBar, log, on_vertex
from trainer.base.run_files.goodput import MUCH
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.job_files import (
    CLASSES,
    QualityOf,
    Result,
    Scalars,
    StatsEntry,
    drop_stats_after,
    step_name,
)
from trainer.base.settings.rules import check_known
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import make_writable, write_whole, writing
from trainer.data.sample_grids import UInt8Array, encode_png, sample_grid
from trainer.reporting.classification import Classification, write_classes
from trainer.reporting.error_lines import tensorflow_writing
from trainer.reporting.progress import (
    MetricCounts,
    Progress,
    RunningMeans,
    State,
    StepLogs,
    by_kind,
    is_loss,
    numbers,
)
from trainer.reporting.resources import Gpus, memory_gib, peak_device_memory_gib
from trainer.user_code.interface import UserModel

# Attributes in a checkpoint.
_STATE = ("epoch_seconds", "final", "measured", "evaluated", "quality", "classes", "counts")
_WIDTH = 100  # columns of a log line
_LINES = 16  # log lines in a run without lines by epoch
_QUIET_S = 60  # the longest time without any line where no bar is shown
_NEWEST_METRICS = 100  # lines that Vertex AI's tuning reads
_METRIC_FILE = "/tmp/hypertune/output.metrics"  # noqa: S108 (the path that Vertex AI reads)


@dataclass
class Reporter:
    """Counts every call to the device, and reports at report steps and at epoch ends.

    `job_dir` is None on a worker that is not the chief, which counts the same but reports nothing.
    `devices` are those of this worker, such as `GPU:0`.
    """

    config: TrainConfig
    job_dir: JobDir | None
    progress: Progress
    latest_checkpoint: Callable[[], str | None]
    devices: Sequence[str] = ()
    # what evaluation and image quality report; set before the first call
    metric_names: Sequence[str] = ()
    # what decides something, as an EarlyStopping's monitor: a log line keeps it
    monitored: Collection[str] = ()

    def __post_init__(self) -> None:
        self._since_report = RunningMeans(self.progress.examples_per_step)
        self._since_epoch = RunningMeans(self.progress.examples_per_step)
        self._counts: MetricCounts = ()  # of the epoch so far
        self._epoch_seconds: list[float] = []
        self._final: dict[str, Scalars] = {}
        self._measured: Scalars = {}  # newest values of evaluations and of image quality
        self._evaluated: Scalars = {}
        self._quality: QualityOf | None = None  # what the newest image quality was measured with
        self._classes: Mapping[str, Any] = {}  # for result.json, from `classified`
        # the step and the time of the newest log line
        self._newest_line = self.progress.step, time.monotonic()
        self._bar: ProgressBar | None = None
        self._gpus: Gpus | None = None
        self._tensorboard: EventFiles | None = None
        self._tuning: TuningMetric | None = None

    def begin(self, *, repeats_step: bool = False) -> None:
        """Opens the chief's outputs, and drops from stats.jsonl the steps that will run again.

        repeats_step: whether the hooks of the restored step will run again, too.
        """
        if not (job_dir := self.job_dir):
            return
        step = self.progress.run_step - repeats_step
        drop_stats_after(job_dir.root, step)
        self._tensorboard = EventFiles(job_dir.logs, step + 1) if self.config.tensorboard else None
        metric = self.config.tuning_metric
        self._tuning = TuningMetric(metric) if metric else None
        self._gpus = Gpus(sum(name.startswith("GPU") for name in self.devices))
        self._bar = ProgressBar(
            "bar",
            "count",
            "text",
            total=self.progress.total_steps,
            completed=self.progress.step,
            text="first step …",
        )

    def state(self) -> State:
        """Returns what a checkpoint stores, so that a resumed run reports the same numbers."""
        return {
            "since_report": asdict(self._since_report),
            "since_epoch": asdict(self._since_epoch),
            **{name: getattr(self, f"_{name}") for name in _STATE},
        }

    def resume(self, state: State) -> None:
        """Restores what `state` returned."""
        self._since_report = RunningMeans.restored(state["since_report"])
        self._since_epoch = RunningMeans.restored(state["since_epoch"])
        self._epoch_seconds = state["epoch_seconds"]
        self._final = {kind: numbers(values) for kind, values in state["final"].items()}
        self._measured = numbers(state["measured"])
        self._evaluated = numbers(state["evaluated"])
        self._quality = state["quality"]
        self._classes = state["classes"]
        self._counts = tuple(np.asarray(count, np.float64) for count in state["counts"])

    def on_call(self, logs: StepLogs) -> Scalars:
        """Counts the newest call to the device, and returns the epoch's means so far.

        It also updates the progress bar. Raises UserError at the first call if this run does not
        report the tuning metric.
        """
        # The names of values are known after the first call.
        progress = self.progress
        if self._tuning and not progress.call_timed:
            names = {*logs.means(), *self.metric_names}
            check_known("tuning_metric", self._tuning.name, "this run reports", names)
        for running in (self._since_report, self._since_epoch):
            running.add(logs, progress.call_seconds, progress.call_timed)
        self._since_report.add_counts(logs, self._counts)
        self._counts = logs.counts

        # A log that nobody watches by a bar gets a line a minute.
        if self._bar:
            parts = [
                progress.speed_text(progress.whole.images_per_second),
                progress.remaining_text,
                # Losses come last, where a narrow terminal cuts the line.
                *(f"{name} {value:.3g}" for name, value in logs.means().items()),
            ]
            text = "  ".join(filter(None, parts))
            self._bar.update(completed=progress.step, total=progress.total_steps, description=text)
            quiet_s = time.monotonic() - self._newest_line[1]
            if quiet_s >= _QUIET_S and not (self._bar.shown or progress.ends or on_vertex()):
                self._show(self._head(), logs.means())
        return self._since_epoch.means()

    def report(self, progress: Progress) -> None:
        """Reports the means since the last report: stats.jsonl, log, TensorBoard and tuning."""
        if not self._since_report.steps:
            return
        means = self._since_report.means()
        entry = self._entry(self._since_report)
        self._since_report = RunningMeans(progress.examples_per_step)
        values = {**means, "memory_gib": entry["memory_gib"]}
        if speed := entry["images_per_second"]:
            values["images_per_second"] = speed
        self._publish("report", entry, values)
        if not (self.by_epoch and self._final):  # else `epoch_end` sets them
            self._final = {"losses": entry["losses"], "metrics": entry["metrics"]}
        if self._bar:
            log.log(logging.INFO if on_vertex() else logging.DEBUG, status_line(entry, progress))
            step = self._newest_line[0]
            now = progress.step
            due = progress.ends or now - step >= progress.total_steps / _LINES
            if step < now and due and not (self.by_epoch or on_vertex()):
                self._show(self._head(), means, entry)

    def epoch_end(self) -> Scalars:
        """Writes the epoch's line of stats.jsonl and the log, with its evaluation.

        Returns its scalars.
        """
        progress = self.progress
        epoch = self._since_epoch
        means = {**epoch.means(), **self._evaluated}
        entry: StatsEntry = {**self._entry(epoch), **by_kind(means)}
        self._append("epoch", entry)
        if self.by_epoch:
            self._final = cast(dict[str, Scalars], by_kind(epoch.means()))
            total = math.ceil(progress.total_steps / progress.steps_per_epoch)
            head = f"epoch {math.ceil(progress.epoch):{len(str(total))}}/{total}"
            self._show(head, means, entry)
        if epoch.timed_steps == epoch.steps == progress.steps_per_epoch:
            self._epoch_seconds.append(epoch.timed_seconds)
        self._since_epoch = RunningMeans(progress.examples_per_step)
        self._counts = ()
        self._evaluated = {}
        return means

    def evaluated(self, progress: Progress, values: Scalars) -> None:
        """Reports the values of an evaluation."""
        self._evaluated = values
        self._measured.update(values)
        self._publish("evaluation", by_kind(values), values)
        # At the end of an epoch its own line shows them.
        if progress.step % progress.steps_per_epoch:
            self._show(self._head(), values)

    def quality(self, progress: Progress, values: Scalars, about: QualityOf) -> None:
        """Reports image quality by name, {} on a worker that is not the chief.

        `about`: what it was measured with.
        """
        self._quality = about
        self._measured.update(values)
        self._publish("quality", {**by_kind(values), "quality": about}, values)
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar:
            log.info(
                f"step {progress.step:,}  {text}  ({about['samples']:,} images, features of"
                f" {about['features']})"
            )

    def classified(self, progress: Progress, classes: Classification | None) -> None:
        """Writes the newest results for each class to their file, and logs the worst classes."""
        if classes is None or not self.job_dir:
            return
        file = self.job_dir.root / CLASSES
        self._classes = {"step": progress.run_step, **write_classes(file, classes)}
        self.job_dir.mirror.put(file)
        least = ", ".join(f"{name} {share:.3f}" for name, share in classes.least_accurate(3))
        log.info(f"least accurate classes: {least}; see {CLASSES}")

    def _append(self, kind: str, entry: StatsEntry) -> None:
        """Appends a line to stats.jsonl, on the chief, with the step and the time."""
        head: StatsEntry = {
            "kind": kind,
            "step": self.progress.run_step,
            "epoch": round(self.progress.epoch, 4),
        }
        if self.job_dir:
            self.job_dir.append_stats({**head, **entry, "time": round(time.time(), 3)})

    @property
    def by_epoch(self) -> bool:
        """Returns whether each epoch gets a log line.

        It does if the run's length is in epochs, or if it evaluates.
        """
        evaluates = any(name.startswith("val_") for name in self.metric_names)
        return self.config.steps is None or evaluates

    def _head(self) -> str:
        """Returns the beginning of a line about a step."""
        total = f"{self.progress.total_steps:,}"
        return f"step {self.progress.step:{len(total)},}/{total}"

    def _show(self, head: str, values: Scalars, entry: StatsEntry | None = None) -> None:
        """Logs a line of these values on the chief.

        It ends with speed, waiting and the remaining time as far as there is room.
        """
        if not self._bar:  # only the chief has one
            return
        progress = self.progress
        speed = progress.speed_text(entry["images_per_second"] if entry else None)
        waits = input_wait_text(entry) if entry else ""
        ends = [speed, waits, progress.remaining_text]
        log.info(fitting_line(head, values, ends, self.monitored))
        self._newest_line = progress.step, time.monotonic()

    def _publish(self, kind: str, entry: StatsEntry, values: Scalars) -> None:
        """Appends a line to stats.jsonl, and reports the values to TensorBoard and tuning."""
        self._append(kind, entry)
        step = self.progress.run_step
        if self._tensorboard:
            self._tensorboard.scalars(step, values)
        if self._tuning and self._tuning.name in values:
            self._tuning.report(step, values[self._tuning.name], self.latest_checkpoint())

    def sample(self, model: UserModel, classes: int, progress: Progress) -> None:
        """Writes a grid of images that `model.sample` makes from noise.

        The noise is the same at every step. If there are classes, each row of the grid shows one.
        """
        if not self.job_dir:
            return
        picture = sample_grid(model, self.config.seed, classes)
        file = self.job_dir.samples / f"{step_name(progress.step)}.png"
        with writing(file):
            file.parent.mkdir(exist_ok=True)
        write_whole(file, encode_png(picture))
        self.job_dir.mirror.put(file)
        if self._tensorboard:
            self._tensorboard.image(progress.step, picture)

    def summary(self) -> Result:
        """Returns peak device memory, seconds of each epoch and final values for result.json."""
        measured = cast(dict[str, Scalars], by_kind(self._measured))
        final = {kind: {**self._final.get(kind, {}), **values} for kind, values in measured.items()}
        return {
            "peak_device_memory_gib": peak_device_memory_gib(self.devices),
            "epoch_seconds": [round(seconds, 4) for seconds in self._epoch_seconds],
            "final": {**final, **({"quality": self._quality} if self._quality else {})},
            **({"classes": dict(self._classes)} if self._classes else {}),
        }

    def close(self) -> None:
        """Closes the progress bar, the GPU readings and the event files."""
        for part in (self._bar, self._gpus, self._tensorboard):
            if part:
                part.close()

    def _entry(self, running: RunningMeans) -> StatsEntry:
        """Returns what a line of stats.jsonl says of some steps: means, speed and memory."""
        return {
            "seconds": round(self.progress.seconds, 3),
            **self.progress.speeds(running),
            "untimed_steps": running.steps - running.timed_steps,
            **by_kind(running.means()),
            "memory_gib": round(memory_gib(), 3),
            "gpus": self._gpus.readings if self._gpus else [],
            "peak_device_memory_gib": peak_device_memory_gib(self.devices),
        }


def fitting_line(
    head: str, values: Scalars, ends: Sequence[str], monitored: Collection[str] = ()
) -> str:
    """Returns a line of at most 100 columns, with each value beside its val_… of evaluation.

    What has no room is left out: first the `ends`, one after another, then the last values that are
    not `monitored`. The last of the `ends` stays if values are left out.
    """
    # Losses come first, as they stay where there is little room; then the values in their order,
    # each before its val_….
    ordered = sorted(values, key=lambda name: name.startswith("val_"))
    plain = [name.removeprefix("val_") for name in ordered]

    def place(name: str) -> tuple[bool, int, int]:
        return not is_loss(name), plain.index(name.removeprefix("val_")), len(name)

    texts = {}
    for name in sorted(values, key=place):
        number = f"{values[name]:.4g}"
        if len(number) > 8:
            number = f"{values[name]:.3g}"
        texts[name] = f"{name} {number:8}"

    # All but the last end go first, then values, the last one first. The last end, the time that is
    # left, goes before them only if all values then have room.
    spare = [name for name in texts if name not in monitored][::-1]

    def joined() -> str:
        return "  ".join(filter(None, [head, *texts.values()])).rstrip()

    fits = len(joined()) <= _WIDTH
    texts |= {f"end {place}": text for place, text in enumerate(ends)}
    *first, last = [name for name in texts if name not in values]
    order = [*first, last, *spare] if fits else [*first, *spare, last]
    while order and len(joined()) > _WIDTH:
        del texts[order.pop(0)]
    return joined()


def input_wait_text(entry: StatsEntry) -> str:
    """Returns text on the share of time in which the devices wait for rows; "" if it is small."""
    waited = (entry.get("input_wait_seconds") or 0.0) / (entry["step_seconds"] or 1.0)
    return f"waits for input {100 * waited:.0f} %" if waited >= MUCH else ""


def status_line(entry: StatsEntry, progress: Progress) -> str:
    """Returns the line of a report: step, losses, metrics, speed, memory and time left."""
    speed = progress.speed_text(entry["images_per_second"])
    rate = entry.get("tflop_per_second") or 0.0
    mfu = entry.get("mfu")
    compute = f"{rate:.3g} TFLOP/s" + (f" (MFU {100 * mfu:.2g} %)" if mfu else "")
    readings = []
    for gpu in entry["gpus"]:
        memory = gpu["memory_gib"]
        used = gpu["utilization_percent"]
        readings.append(
            ("" if memory is None else f" {memory:.1f} GiB")
            + ("" if used is None else f" {used:.0f} %")
        )
    parts = [
        f"step {progress.step:,}/{progress.total_steps:,}",
        f"epoch {progress.epoch:.1f}",
        *(f"{name} {value:.4g}" for name, value in {**entry["losses"], **entry["metrics"]}.items()),
        speed,
        f"{entry['step_seconds']:.3g} s/step" if speed else "",
        compute if rate >= 0.01 else "",  # a small network on a CPU has too little to show
        input_wait_text(entry),
        f"{entry['memory_gib']:.2f} GiB",
        *(f"GPU{reading}" for reading in readings if reading),
        progress.remaining_text,
    ]
    return "  ".join(filter(None, parts))


class EventFiles:
    """Writes TensorBoard's event files to `folder`, without the tensorboard package.

    Each start notes its `first_step`, from which on TensorBoard drops the points of earlier
    processes.
    """

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        self._folder = folder
        with tensorflow_writing(folder):
            # TensorBoard reads files by their names: "-" sorts before the "." that follows in the
            # name of the points' file.
            suffix = f"-{first_step}"
            start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
            with (
                tf.Graph().as_default(),
                tf.compat.v1.summary.FileWriter(str(folder), filename_suffix=suffix) as file,
            ):
                file.add_session_log(start, first_step)
            self._writer = tf.summary.create_file_writer(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each curve, and writes them to disk."""
        with tensorflow_writing(self._folder), self._writer.as_default():
            for name, value in values.items():
                point = tf.constant(value, tf.float32)
                tf.summary.write(name, point, step=step, metadata=_plugin("scalars"))
            self._writer.flush()

    def image(self, step: int, picture: UInt8Array) -> None:
        """Adds a grid of samples, (height, width, 1 or 3), uint8."""
        height, width = picture.shape[:2]
        value = tf.constant([str(width).encode(), str(height).encode(), encode_png(picture)])
        with tensorflow_writing(self._folder), self._writer.as_default():
            tf.summary.write("samples", value, step=step, metadata=_plugin("images"))

    def close(self) -> None:
        """Writes buffered events to disk and closes the file."""
        with tensorflow_writing(self._folder):
            self._writer.close()


def _plugin(name: str) -> Any:
    """Returns metadata by which TensorBoard shows a value in the dashboard of this name."""
    return tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name=name)
    )


class TuningMetric:
    """Reports one metric to Vertex AI's hyperparameter tuning.

    It reads the newest 100 values as JSON lines. The format is that of the cloudml-hypertune
    package: https://github.com/GoogleCloudPlatform/cloudml-hypertune
    """

    def __init__(self, name: str, environment: Mapping[str, str] = os.environ) -> None:
        self.name = name
        self._file = Path(environment.get("CLOUD_ML_HP_METRIC_FILE") or _METRIC_FILE)
        self._trial = environment.get("CLOUD_ML_TRIAL_ID", "0")
        self._lines: deque[str] = deque(maxlen=_NEWEST_METRICS)
        make_writable(self._file.parent, "tuning_metric's file, in")

    def report(self, step: int, value: float, checkpoint: str | None) -> None:
        """Adds one line, with values as text as Vertex AI expects, and writes the newest ones."""
        line = {
            "timestamp": time.time(),
            "trial": self._trial,
            self.name: str(value),
            "global_step": str(step),
            "checkpoint_path": checkpoint or "",
        }
        self._lines.append(json.dumps(line, sort_keys=True) + "\n")
        write_whole(self._file, "".join(self._lines))
