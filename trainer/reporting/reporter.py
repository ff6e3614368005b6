"""What a run tells while it goes: the status line or bar, stats.jsonl, TensorBoard, the tuning metric, sample grids."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import keras

from trainer.config.metric_names import check_known
from trainer.config.train_config import TrainConfig
from trainer.data.images import encode_png, grid, noise
from trainer.interface import Samples
from trainer.log import log
from trainer.reporting.console import Bar, status_line
from trainer.reporting.job_directory import JobDir
from trainer.reporting.progress import Progress, RunningMeans, StepLogs, by_kind, numbers, rounded
from trainer.reporting.resources import Gpus, memory_gib
from trainer.reporting.stats import Stats
from trainer.reporting.tensorboard import EventFiles
from trainer.reporting.tuning import TuningMetric
from trainer.storage import write_whole, writing

SAMPLES = 64


class Reporter:
    """Hears of every call to the device; tells at report steps and at epoch ends.

    `job_dir` is None on a worker that is not the chief: it counts the same, and writes and says nothing.
    """

    def __init__(
        self,
        config: TrainConfig,
        job_dir: JobDir | None,
        progress: Progress,
        latest_checkpoint: Callable[[], str | None],
    ) -> None:
        self._job_dir, self._seed = job_dir, config.seed
        self._since_report, self._since_epoch = self._window(progress), self._window(progress)
        self._stats = Stats(job_dir.stats_file, progress.step) if job_dir else None
        self._tensorboard = EventFiles(job_dir.logs) if job_dir and config.tensorboard else None
        self._tuning = TuningMetric(config.tuning_metric) if job_dir and config.tuning_metric else None
        self._latest_checkpoint = latest_checkpoint
        self._gpus = Gpus() if job_dir else None
        self._bar = Bar(progress) if job_dir else None
        self._epoch_seconds: list[float] = []
        self._final: dict[str, dict[str, float]] = {}
        self._measured: dict[str, float] = {}  # by evaluation, FID and KID: the newest of each
        self._evaluated: dict[str, float] = {}
        self._fid_features: str | None = None
        self.measures: Sequence[str] = ()  # what evaluation, FID and KID will add to the values of the steps

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that means and summaries go on as if nothing had happened."""
        return {
            "since_report": asdict(self._since_report),
            "since_epoch": asdict(self._since_epoch),
            "epoch_seconds": self._epoch_seconds,
            "final": self._final,
            "measured": self._measured,
            "evaluated": self._evaluated,
            "fid_features": self._fid_features,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state()` gave."""
        self._since_report, self._since_epoch = (
            RunningMeans.restored(state[f"since_{name}"]) for name in ("report", "epoch")
        )
        self._epoch_seconds = [float(seconds) for seconds in state["epoch_seconds"]]
        self._final = {kind: numbers(values) for kind, values in state["final"].items()}
        self._measured, self._evaluated = numbers(state["measured"]), numbers(state["evaluated"])
        self._fid_features = state["fid_features"]

    def on_call(self, progress: Progress, logs: StepLogs) -> None:
        """Counts the newest call to the device."""
        if not progress.call_timed:
            self._check_tuning(logs.means())
        for window in (self._since_report, self._since_epoch):
            window.add(logs, progress.call_seconds, progress.call_timed)
        if self._bar:
            self._bar.update(progress, logs.means())

    def report(self, progress: Progress) -> None:
        """Tells the means since the last report."""
        if not self._since_report.steps:
            return
        means = self._since_report.means()
        entry = self._entry("report", progress, self._since_report)
        self._since_report = self._window(progress)
        self._keep(entry)
        self._final = {"losses": entry["losses"], "metrics": entry["metrics"]}
        if self._bar and not self._bar.shown:
            log.info(status_line(entry, progress))
        if self._tensorboard:
            speed = {"images_per_second": entry["images_per_second"]} if entry["images_per_second"] else {}
            self._tensorboard.scalars(progress.step, {**means, **speed, "memory_gib": entry["memory_gib"]})
            self._tensorboard.flush()
        self._tune(progress, means)

    def epoch_end(self, progress: Progress) -> dict[str, float]:
        """Writes the epoch's line of stats.jsonl, with its evaluation where there was one; returns its scalars."""
        means = {**self._since_epoch.means(), **self._evaluated}
        self._keep({**self._entry("epoch", progress, self._since_epoch), **by_kind(means)})
        if self._since_epoch.timed_steps == self._since_epoch.steps == progress.steps_per_epoch:
            self._epoch_seconds.append(self._since_epoch.timed_seconds)
        self._since_epoch = self._window(progress)
        return means

    def evaluated(self, progress: Progress, found: dict[str, float]) -> None:
        """Tells loss and accuracy on the evaluation examples."""
        self._evaluated = found
        self._measure("evaluation", progress, found, f"epoch {progress.epoch:.1f}")

    def quality(self, progress: Progress, found: dict[str, float], features: str, samples: int) -> None:
        """Tells FID and KID: `found` by name, {} on a worker that is not the chief.

        `features`: the network whose features they compare; `samples`: real images, and as many generated ones.
        """
        self._fid_features = features
        note = f"{samples:,} images, features of {features}"
        self._measure("quality", progress, found, note, features=features, samples=samples)

    def _keep(self, entry: Mapping[str, Any]) -> None:
        if self._stats and self._job_dir:
            self._stats.append(entry)
            self._job_dir.mirror.put(self._job_dir.stats_file)

    def _measure(self, kind: str, progress: Progress, found: dict[str, float], note: str, **about: Any) -> None:
        entry = {"kind": kind, "step": progress.step, "epoch": round(progress.epoch, 4), **by_kind(found), **about}
        self._keep(entry)
        self._measured.update(found)
        self._tune(progress, found)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in found.items())
        if self._bar:
            log.info(f"step {progress.step:,}  {shown}  ({note})")
        if self._tensorboard:
            self._tensorboard.scalars(progress.step, found)

    def sample(self, model: Samples, progress: Progress) -> None:
        """Writes a grid of images from noise that is the same at every step."""
        if not self._job_dir:
            return
        images = model.sample(noise(self._seed, SAMPLES, model.latent_dim, keras.config.floatx()))
        picture = grid(images)
        file = self._job_dir.samples / f"step-{progress.step:08d}.png"
        with writing(file):
            file.parent.mkdir(exist_ok=True)
        write_whole(file, encode_png(picture))
        self._job_dir.mirror.put(file)
        if self._tensorboard:
            self._tensorboard.image(progress.step, "samples", picture)

    def summary(self) -> dict[str, Any]:
        """What the reports add to result.json."""
        measured = by_kind(self._measured)
        final: dict[str, Any] = {kind: {**self._final.get(kind, {}), **values} for kind, values in measured.items()}
        if self._fid_features:
            final["fid_features"] = self._fid_features
        return {"epoch_seconds": [round(seconds, 4) for seconds in self._epoch_seconds], "final": final}

    def close(self) -> None:
        """Ends the bar and the event files."""
        if self._bar:
            self._bar.close()
        if self._tensorboard:
            self._tensorboard.close()

    def _entry(self, kind: str, progress: Progress, window: RunningMeans) -> dict[str, Any]:
        return {
            "kind": kind,
            "step": progress.step,
            "epoch": round(progress.epoch, 4),
            "seconds": round(progress.seconds, 3),
            "images_per_second": rounded(window.images_per_second),
            "step_seconds": rounded(window.step_seconds),
            "untimed_steps": window.steps - window.timed_steps,  # above 0 in the first entry after each start
            **by_kind(window.means()),
            "memory_gib": round(memory_gib(), 3),
            "gpus": self._gpus.read() if self._gpus else [],
        }

    def _tune(self, progress: Progress, found: dict[str, float]) -> None:
        """Passes the tuning metric on, where `found` has it."""
        if self._tuning and self._tuning.name in found:
            self._tuning.report(progress.step, found[self._tuning.name], self._latest_checkpoint())

    def _check_tuning(self, names: Iterable[str]) -> None:
        """UserError for a tuning metric that this run never reports, told after the first call to the device."""
        if self._tuning:
            check_known("tuning_metric", self._tuning.name, "this run reports", {*names, *self.measures})

    @staticmethod
    def _window(progress: Progress) -> RunningMeans:
        return RunningMeans(progress.examples_per_step)
