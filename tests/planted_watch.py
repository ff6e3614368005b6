"""Plants the clock by which a job watches its limits, and the use of its GPUs."""

from tests.fixtures import Patch
from trainer.base import limit_watch


class PlantedWatch:
    """Stands for the clock and for nvidia-smi: `now` and the `percent` of each GPU change as a test
    says."""

    def __init__(self, monkeypatch: Patch, *percent: float | None) -> None:
        self.now = 0.0
        self.percent = percent
        monkeypatch.setattr(limit_watch, "time", self)
        monkeypatch.setattr(limit_watch, "read_gpus", self.read)

    def monotonic(self) -> float:
        return self.now

    def read(self) -> list[dict[str, float | None]]:
        return [{"memory_gib": 1.0, "utilization_percent": percent} for percent in self.percent]
