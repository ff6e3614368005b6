"""Serves a run's model on this machine: `python -m deploy serve RUN --port=8080`."""

import os
import sys
from collections.abc import Sequence

from deploy.client.arguments import parser


def main(arguments: Sequence[str]) -> int:
    """Becomes `python -m trainer.serve`, which needs TensorFlow, with the same arguments."""
    cli = parser("serve", __doc__ or "", "RUN [--port=8080] [--host=ADDRESS] [--fixed_batch=ROWS]")
    cli.add_argument("run", metavar="RUN", help="a job directory or its model/; also at gs://")
    for name, meaning in (
        ("port", "(default: 8080)"), ("host", "address to bind (default: 127.0.0.1)"),
        ("fixed_batch", "rows of each call of the model (default: that of the model directory)"),
    ):  # fmt: skip
        cli.add_argument(f"--{name}", metavar=name.upper(), help=meaning)
    cli.parse_args(arguments)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainer.serve", *arguments])  # noqa: S606 (no shell)
