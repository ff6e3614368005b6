"""Reports the numbers of a training script. This file is shipped with the script, and needs only
the standard library.

from vertex_report import report

report(step=100, loss=0.25, accuracy=0.91)
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any


def report(step: int, **values: Any) -> None:
    """Reports how far the training is, and its losses and metrics since the last report.

    `step`: steps done so far; `values`: losses and metrics by name, each a number or an object with
        `__float__`, such as a scalar of TensorFlow or PyTorch. Raises TypeError for other values.
        Outside of a job the report is printed as a line.
    """
    line: dict[str, float] = {
        "step": int(step),
        **{name: float(value) for name, value in values.items()},
    }
    reports = os.environ.get("VERTEX_REPORT_FILE")
    if not reports:
        print(json.dumps(line), flush=True)
        return
    # Each report is one short write, so that the reports of several processes do not mix. A full
    # disk must not end the training.
    with contextlib.suppress(OSError), open(reports, "ab", buffering=0) as file:
        file.write(json.dumps([time.monotonic(), line]).encode() + b"\n")
