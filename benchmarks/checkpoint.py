"""Measures training with a checkpoint every 50 steps against none, WGAN-GP 64x64: `python -m
benchmarks.checkpoint`."""

import statistics
import tempfile
from pathlib import Path

from benchmarks.runner import compare, elapsed, make_parser, program, save
from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.training.checkpoint import Checkpoints

# short steps, large state
SETTINGS = ["--model=wgan_gp", "--data=digits", "--image_size=64", "--global_batch_size=16"]
EVERY = 50
PARSER = make_parser(__doc__, repeats=7)


class Training:
    """Trains and saves through all measurements."""

    def __init__(self, folder: Path) -> None:
        setup = setup_of(*SETTINGS)
        self._loop = TrainingLoop(setup)
        self._checkpoints = Checkpoints(setup.model, setup.replicas, folder, keep=3)

    def run(self, steps: int, *, save: bool = False) -> None:
        """Runs steps in calls of 10, with a checkpoint in the background if `save`, until both have
        ended."""
        if save:
            self._checkpoints.save(self._loop.step, {})
        for _ in range(0, steps, 10):
            self._loop(10)
        self._checkpoints.wait()

    def save_alone(self) -> tuple[float, float]:
        """Returns the seconds that training waits for a checkpoint, and until it is stored, with no
        steps beside it."""
        self.run(10)
        waited = elapsed(lambda: self._checkpoints.save(self._loop.step, {}))
        return waited, waited + elapsed(self._checkpoints.wait)


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    repeats = PARSER.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder) / "checkpoints")
        training.run(20)  # traces and warms up
        candidates = {
            "no checkpoint": lambda: elapsed(lambda: training.run(EVERY)),
            f"a checkpoint every {EVERY} steps": lambda: elapsed(
                lambda: training.run(EVERY, save=True)
            ),
        }
        cost = compare(f"{EVERY} steps of WGAN-GP 64x64", candidates, repeats)
        saves = [training.save_alone() for _ in range(repeats)]
        waited, whole = (statistics.median(part) for part in zip(*saves, strict=True))
        print(
            f"\nOne save alone: {whole:.3f} s, of which training waits {waited:.4f} s"
            f" ({waited / whole:.1%})."
        )
    save("checkpoint", seconds=cost, save_waited_and_whole=saves)
