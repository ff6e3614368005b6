"""Shows the progress of a run on the console: a status line for each report, or a progress bar on a terminal."""

from collections.abc import Mapping

from trainer.base.run_files.goodput import MUCH
from trainer.base.run_files.records import StatsEntry
from trainer.base.terminal import ProgressBar, duration
from trainer.reporting.progress import Progress


def status_line(entry: StatsEntry, progress: Progress) -> str:
    """Returns step, losses and metrics, speed, memory and time left on one line."""
    parts = [f"step {progress.step:,}/{progress.total_steps:,}", f"epoch {progress.epoch:.1f}"]
    parts += [f"{name} {value:.4g}" for name, value in {**entry["losses"], **entry["metrics"]}.items()]
    if entry["images_per_second"]:
        parts += [f"{entry['images_per_second']:,.0f} {progress.unit}/s", f"{entry['step_seconds']:.3g} s/step"]
    waited = (entry.get("input_wait_seconds") or 0.0) / (entry["step_seconds"] or 1.0)
    if waited >= MUCH:
        parts.append(f"waits for input {100 * waited:.0f} %")
    parts.append(f"{entry['memory_gib']:.2f} GiB")
    for gpu in entry["gpus"]:
        memory, used = gpu["memory_gib"], gpu["utilization_percent"]
        readings = ["" if memory is None else f" {memory:.1f} GiB", "" if used is None else f" {used:.0f} %"]
        parts += ["GPU" + "".join(readings)] if any(readings) else []
    if progress.seconds_left:
        parts.append(f"{duration(progress.seconds_left)} left")
    return "  ".join(parts)


class Bar:
    """Draws a progress bar if the output is a terminal."""

    def __init__(self, progress: Progress) -> None:
        total, step = progress.total_steps, progress.step
        self._bar = ProgressBar("bar", "count", "text", total=total, completed=step, text="first step …")
        self.shown = self._bar.shown

    def update(self, progress: Progress, means: Mapping[str, float]) -> None:
        """Shows the newest losses, the speed and the time left."""
        if not self.shown:
            return
        parts = []  # losses come last: a narrow terminal cuts them first
        if progress.whole.images_per_second:
            parts.append(f"{progress.whole.images_per_second:,.0f} {progress.unit}/s")
        if progress.seconds_left is not None:
            parts.append(f"{duration(progress.seconds_left)} left")
        parts += [f"{name} {value:.3g}" for name, value in means.items()]
        self._bar.update(completed=progress.step, total=progress.total_steps, description="  ".join(parts))

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()
