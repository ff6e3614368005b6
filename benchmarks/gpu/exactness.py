"""Trains twice with and without --deterministic and compares the weights bit by bit."""

import hashlib
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py

from benchmarks.gpu.execution import Results, rehearsing, turn

RECIPES = {"cnn": ["--recipe=cnn_mnist", "--data=digits"], "wgan_gp": ["--recipe=wgan_gp_digits"]}
SMALL = ["--width=4", "--global_batch_size=8", "--steps=3"]


@turn(alone=False)
def main() -> None:
    """Keeps whether two runs of the same command ended with the same bits."""
    results, equal = Results(), dict[str, bool]()
    runs = [(name, f"--deterministic={way}") for name in RECIPES for way in ("true", "false")]
    with ThreadPoolExecutor(1 if rehearsing() else len(runs)) as threads:
        digests = [[threads.submit(_digest, [*RECIPES[name], way]) for _ in range(2)] for name, way in runs]
        for (name, way), pair in zip(runs, digests, strict=True):
            equal[f"{name} {way}"] = pair[0].result() == pair[1].result()
            results.keep(equal_bits=equal)


def _digest(flags: list[str]) -> str:
    """Trains 30 steps; returns the SHA-256 of all weights of the model that is saved."""
    size = SMALL if rehearsing() else ["--steps=30"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer.task", *flags, *size, f"--job_dir={folder}", "--jit_compile=false"]
        subprocess.run(command, check=True)
        digest = hashlib.sha256()
        with h5py.File(next(Path(folder).rglob("model.h5"))) as file:
            file.visititems(
                lambda _, item: digest.update(item[()].tobytes()) if isinstance(item, h5py.Dataset) else None
            )
    return digest.hexdigest()


if __name__ == "__main__":
    main()
