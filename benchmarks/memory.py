"""Whether memory stays flat over epochs: `python -m benchmarks.memory`."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import base_parser, count, keep, run_main


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__)
    parser.add_argument("--epochs", type=count, default=400)
    return parser


def main() -> None:
    """Trains a small WGAN-GP for many epochs and prints the memory at a few of them."""
    epochs = make_parser().parse_args().epochs
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--recipe=wgan_gp_digits", f"--epochs={epochs}", "--width=8", "--sample_every_steps=100"]
        command = [sys.executable, "-m", "trainer.task", f"--job_dir={folder}", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "stats.jsonl").read_text().splitlines()]
    gib = [line["memory_gib"] for line in lines if line["kind"] == "epoch"]
    print("\nMemory over epochs (wgan_gp_digits, width 8, checkpoints and samples on)\n\n| epoch | GiB |\n|--:|--:|")
    for share in (0.05, 0.25, 0.5, 0.75, 1.0):
        epoch = max(1, round(share * epochs))
        print(f"| {epoch} | {gib[epoch - 1]:.3f} |")
    keep("memory", {"command": "python -m benchmarks.memory", "memory_gib_by_epoch": gib})


if __name__ == "__main__":
    run_main(main)
