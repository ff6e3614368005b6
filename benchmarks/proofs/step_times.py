"""Compares times of steps with those of another checkout, and with Keras `fit`.

`python -m benchmarks.proofs.step_times CHECKOUT [--only=NAME]` trains recipes, examples and networks of a user's own by
the code of both checkouts, in turns; networks of a user's own by `fit` too, with 1 and 10 steps per execution.
"""

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import keras
import tensorflow as tf

from benchmarks.keras_fit import Clock
from benchmarks.processes import CONSTANT_RATE, ROOT, Candidate, Run, Work, started
from benchmarks.runner import alternate, make_parser, program, ratios
from benchmarks.trainer_loop import networks, optimizers, work_of
from tests.own_runs import EXAMPLES, arguments_of, recipe_flags
from trainer.base.settings.resolution import recipe_names
from trainer.base.settings.train_config import TrainConfig
from trainer.user_code.dotted_names import load_function

PARSER = make_parser(__doc__, repeats=5, seconds=2.0)
PARSER.add_argument("checkout", type=Path, help="folder of an earlier commit, as `git worktree add` makes it")
PARSER.add_argument("--only", default="", help="cases whose name contains this")
NETWORKS = ROOT / "benchmarks" / "gpu" / "networks.py"  # an earlier commit may not have it
OWN = {
    "unet": ["--model=networks:unet", "--data=networks:masks", "--global_batch_size=4"],
    "transformer": ["--model=networks:transformer", "--data=networks:sentences", "--global_batch_size=8"],
}
OURS, BEFORE = "ours", "ours before"


def make_candidate(config: TrainConfig, option: str) -> tuple[Run, Work]:
    """Returns `fit` of the model and data that `config` names, with `option` steps per execution; a step is its work.

    Keras compiles by XLA what it can.
    """
    x, y = load_function(config.data, "data")(config)
    model: keras.Model = load_function(config.model, "model")(config, None)
    model.compile(model.optimizer, model.loss, metrics=["accuracy"], steps_per_execution=int(option))
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(config.global_batch_size)
    clock = Clock()

    def run(steps: int) -> float:
        model.fit(rows.prefetch(tf.data.AUTOTUNE), steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return clock.seconds

    return run, work_of(networks(model), optimizers(model))


def cases() -> Iterator[tuple[str, list[str]]]:
    """Yields names and flags."""
    for name, flags in OWN.items():
        yield f"own {name}", [*flags, "--learning_rate=1e-3"]
    for name in recipe_names():
        yield f"recipe {name}", [*recipe_flags(name), *CONSTANT_RATE]
    for name in EXAMPLES:
        yield f"example {name}", [word for word in arguments_of(name) if not word.startswith(("--steps", "--job_dir"))]


def makers(name: str, flags: list[str], checkout: Path) -> dict[str, Callable[[], Candidate]]:
    """Returns what starts each candidate of a case."""
    programs = {OURS: ("trainer_loop", ROOT), BEFORE: ("trainer_loop", checkout)}
    if name.startswith("own "):
        programs |= {f"{OURS}, auto": ("trainer_loop:auto", ROOT)}
        programs |= {f"fit by {steps}": (f"proofs.step_times:{steps}", ROOT) for steps in (1, 10)}
    return {
        title: partial(Candidate, module, flags, 1, multiple=10, checkout=folder)
        for title, (module, folder) in programs.items()
    }


@program
def main() -> None:
    """Prints for each case the median steps/s of each candidate, and ours by each of the others in the same round."""
    options = PARSER.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(NETWORKS, folder)
        os.environ["PYTHONPATH"] = folder
        for name, flags in cases():
            if options.only not in name:
                continue
            with started(makers(name, flags, options.checkout.resolve()), options.seconds) as candidates:
                rates = alternate(candidates, options.repeats)
            for title, of_rounds in rates.items():
                ratio = statistics.median(ratios(rates, OURS, title))
                print(f"{name}: {title}: {statistics.median(of_rounds):.4g} steps/s, ours {ratio:.3f} x", flush=True)
