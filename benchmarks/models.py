"""images/s on the cores of this machine against a tutorial-style loop, Keras `fit` and PyTorch:
`python -m benchmarks.models [--cases=mlp,cnn]`.

Networks, optimizers, batch and rows are the same; ours also keeps a GAN's moving average, which no peer does.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version

from benchmarks.digits import images_a_step, on_digits
from benchmarks.measure import alternate, base_parser, keep, possible, run_main, some_of, table
from benchmarks.turns import CONSTANT_RATE, Contender, started
from trainer.config.train_config import TrainConfig

SHORT_STEPS = "wgan_gp-16"  # of which a loop's own work is a large part
CASES = {
    "wgan_gp-32": ["--recipe=wgan_gp_mnist"],
    "wgan_gp-64": ["--recipe=wgan_gp_photos", "--augment=", "--global_batch_size=32"],
    "dcgan": ["--recipe=dcgan_mnist", "--global_batch_size=64"],
    "cnn": ["--recipe=cnn_mnist", *CONSTANT_RATE],
    "mlp": ["--recipe=mlp_mnist", *CONSTANT_RATE],
    SHORT_STEPS: ["--recipe=wgan_gp_mnist", "--image_size=16", "--global_batch_size=8"],
}
OURS, BFLOAT16, TUTORIAL = "ours", "ours, mixed_bfloat16", "tutorial-style loop"
CONTENDERS = {
    OURS: "ours",
    BFLOAT16: "ours",
    TUTORIAL: "tutorial",
    "Keras fit": "fit:1",
    "Keras fit, 10 steps per execution": "fit:10",
    "Keras fit, 10 steps per execution, XLA": "fit:10x",
    "PyTorch eager": "pytorch:eager",
    "PyTorch channels_last": "pytorch:channels_last",
    "PyTorch torch.compile": "pytorch:compile",
}
IN_CASE = {SHORT_STEPS: (OURS, TUTORIAL)}  # where not all take part


def compare(
    config: TrainConfig, flags: Sequence[str], names: Iterable[str], repeats: int, seconds: float
) -> dict[str, list[float]]:
    """images/s of the contenders of these names, `repeats` times in turn."""
    makers: dict[str, Callable[[], Contender]] = {}
    for name in names:
        own = ["--precision=mixed_bfloat16"] if name == BFLOAT16 else []
        # Whole tens of steps for all, as one `fit` needs: else its turns were longer and their start cost it less.
        makers[name] = partial(Contender, CONTENDERS[name], [*flags, *own], images_a_step(config), multiple=10)
    with started(possible(makers), seconds) as contenders:
        for name, contender in contenders.items():
            assert contender.work == contenders[OURS].work, f"{name} does other work than ours"
        print(f"\nThe step of all: {contenders[OURS].work}")
        return alternate(contenders, repeats)


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=5, seconds=3.0)
    parser.add_argument("--cases", type=some_of(CASES), default=",".join(CASES), help="default: %(default)s")
    return parser


def main() -> None:
    """Prints one table a case and keeps the raw numbers."""
    options = make_parser().parse_args()
    packages = {name: version(name) for name in ("tensorflow", "keras", "torch") if importlib.util.find_spec(name)}
    command = " ".join(["python -m benchmarks.models", *sys.argv[1:]])
    raw, began = {}, time.monotonic()
    for case in options.cases:
        with on_digits(CASES[case]) as (config, flags):
            names = IN_CASE.get(case, CONTENDERS)
            raw[case] = compare(config, flags, names, options.repeats, options.seconds)
        size = f"{config.image_size}x{config.image_size}x{config.channels}"
        title = f"{config.model} {size}, batch {config.global_batch_size}, width {config.width}"
        print("\n".join([f"\n{title}", "", *table(raw[case], OURS, "images/s")]), flush=True)
        took = round(time.monotonic() - began)
        keep("models", {"command": command, "packages": packages, "seconds": took, "images_per_second": raw})


if __name__ == "__main__":
    run_main(main)
