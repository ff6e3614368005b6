"""Serves a run's model on this machine: `python -m deploy serve RUN --port=8080`."""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Becomes `python -m trainer.serve`, which needs TensorFlow, with the same arguments."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainer.serve", *arguments])  # noqa: S606 (no shell)
