"""Formats durations and shows progress bars for people at a terminal."""

import sys
from typing import Any

from trainer.base.log import on_vertex


def duration(seconds: float, hours_always: bool = False) -> str:
    """Returns H:MM:SS, or M:SS below an hour unless `hours_always`, rounded to whole seconds."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours or hours_always else f"{minutes}:{rest:02d}"


class ProgressBar:
    """Shows a progress bar, but only where stdout is a terminal and not on Vertex AI.

    columns: some of "bar", "count", "bytes", "speed", "left" (remaining time) and "text" (the description), in order.
    """

    def __init__(
        self, *columns: str, total: float | None = None, completed: int = 0, text: str = "", hidden: bool = False
    ) -> None:
        self.shown = sys.stdout.isatty() and not (hidden or on_vertex())
        if self.shown:
            from rich import progress as rich

            columns_by_name = {
                "bar": rich.BarColumn(20),
                "count": rich.MofNCompleteColumn(),
                "bytes": rich.DownloadColumn(),
                "speed": rich.TransferSpeedColumn(),
                "left": rich.TimeRemainingColumn(),
                "text": rich.TextColumn("{task.description}", markup=False),
            }
            self._bar = rich.Progress(*(columns_by_name[name] for name in columns))
            self._task = self._bar.add_task(text, total=total, completed=completed)
            self._bar.start()

    def update(self, **changes: Any) -> None:
        """Changes `completed`, `total` or `description`, or adds `advance`, as rich.progress.Progress.update does."""
        if self.shown:
            self._bar.update(self._task, **changes)

    def close(self) -> None:
        """Stops updating and leaves the bar on the screen."""
        if self.shown:
            self._bar.stop()
