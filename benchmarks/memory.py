"""Measures the memory of a run over many epochs: `python -m benchmarks.memory`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.runner import count, make_parser, print_table, program, save

PARSER = make_parser(__doc__)
PARSER.add_argument("--epochs", type=count, default=400)


@program
def main() -> None:
    """Trains a small WGAN-GP with checkpoints and samples; prints the memory after some of the epochs."""
    epochs = PARSER.parse_args().epochs
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--recipe=wgan_gp_digits", f"--epochs={epochs}", "--width=8", "--sample_every_steps=100"]
        command = [sys.executable, "-m", "trainer.task", f"--job_dir={folder}", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "stats.jsonl").read_text().splitlines()]
    gib = [line["memory_gib"] for line in lines if line["kind"] == "epoch"]
    shown = [max(1, round(share * epochs)) for share in (0.05, 0.25, 0.5, 0.75, 1.0)]
    rows = [f"| {epoch} | {gib[epoch - 1]:.3f} |" for epoch in shown]
    print_table("Memory (wgan_gp_digits, width 8)", ["| epoch | GiB |", "|--:|--:|", *rows])
    save("memory", memory_gib_by_epoch=gib)
