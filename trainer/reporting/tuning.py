"""Writes the metric file that Vertex AI's hyperparameter tuning reads: the newest 100 values as JSON lines.

The format is that of the cloudml-hypertune package: https://github.com/GoogleCloudPlatform/cloudml-hypertune
"""

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from trainer.base.storage import make_writable, write_whole

_NEWEST = 100
_DEFAULT_FILE = "/tmp/hypertune/output.metrics"  # noqa: S108 (the path that Vertex AI reads)


class TuningMetric:
    """Reports one metric to hyperparameter tuning."""

    def __init__(self, name: str, environment: Mapping[str, str] = os.environ) -> None:
        self.name = name
        self._file = Path(environment.get("CLOUD_ML_HP_METRIC_FILE") or _DEFAULT_FILE)
        self._trial = environment.get("CLOUD_ML_TRIAL_ID", "0")
        self._lines: deque[str] = deque(maxlen=_NEWEST)
        make_writable(self._file.parent, "tuning_metric's file, in")

    def report(self, step: int, value: float, checkpoint: str | None) -> None:
        """Adds one line, with values as text as the reader expects."""
        line = {
            "timestamp": time.time(),
            "trial": self._trial,
            self.name: str(value),
            "global_step": str(step),
            "checkpoint_path": checkpoint or "",
        }
        self._lines.append(json.dumps(line, sort_keys=True) + "\n")
        write_whole(self._file, "".join(self._lines))
