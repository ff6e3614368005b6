"""images/s of our loop against a tutorial-style loop on the same networks: `python -m benchmarks.wgan_gp`.

Ours also keeps the generator's moving average, which the tutorial's loop does not.
"""

import argparse
from collections.abc import Callable

import keras
import tensorflow as tf

from benchmarks.measure import alternate, images_per_second, keep, table
from benchmarks.tutorial import TutorialLoop
from trainer.assembly import assemble
from trainer.config import TrainConfig, resolve
from trainer.data.dataset import Dataset
from trainer.data.sources import load_dataset
from trainer.distribution.strategy import make_replicas
from trainer.training.loop import CALL_SECONDS

CASES = {"32x32, batch 64": ("32", "64"), "16x16, batch 8": ("16", "8")}


def our_loop(config: TrainConfig, dataset: Dataset) -> Callable[[int], int]:
    """Our loop, ten steps a call to the device."""
    assembly = assemble(config, make_replicas(config), dataset)
    iterator, run_steps, position = assembly.rows_from(0), assembly.step_runner(), 0

    def run(steps: int) -> int:
        nonlocal position
        run_steps(iterator, position, steps)
        position += steps
        return steps * assembly.schedule.examples_per_step

    return run


def compare(size: str, batch: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    """images/s of every contender, `repeats` times in turn."""
    flags = [f"--image_size={size}", f"--global_batch_size={batch}", "--width=32"]
    config = resolve(flags).config
    dataset = load_dataset(config)
    ours = our_loop(config, dataset)
    tutorial = TutorialLoop(config, dataset).run
    half = our_loop(resolve([*flags, "--precision=mixed_bfloat16"]).config, dataset)
    contenders = {"ours": ours, "tutorial-style loop": tutorial, "ours, mixed_bfloat16": half}
    for run in contenders.values():
        run(3)  # traces and warms up
    keras.config.set_dtype_policy("float32")
    return alternate({name: images_per_second(run, seconds) for name, run in contenders.items()}, repeats)


def main() -> None:
    """Prints one table a case and keeps the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2 * CALL_SECONDS, help="of each measurement")
    options = parser.parse_args()
    raw = {}
    for case, (size, batch) in CASES.items():
        raw[case] = compare(size, batch, options.repeats, options.seconds)
        print("\n".join([f"\nWGAN-GP {case}, width 32, 5 critic steps", "", *table(raw[case], "ours", "images/s")]))
    keep("wgan_gp", {"command": "python -m benchmarks.wgan_gp", "tensorflow": tf.__version__, "images_per_second": raw})


if __name__ == "__main__":
    main()
