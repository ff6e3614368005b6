"""Measures images/s on the cores of this machine against a tutorial-style loop, Keras `fit` and
PyTorch:
`python -m benchmarks.models [--cases=mlp,cnn]`.

Networks, optimizers, batch and rows are the same; ours also updates a GAN's moving average, which
no peer does.
"""

from functools import partial

from benchmarks.processes import CONSTANT_RATE, Candidate, digits_file, images_per_step, started
from benchmarks.runner import (
    alternate,
    make_parser,
    possible,
    print_table,
    program,
    save,
    some_of,
    table,
)
from trainer.run.step_program import MOST_STEPS

LOOPED_MLP = "looped-mlp"  # of which a step takes less time than its start
SHORT_STEPS = "wgan_gp-16"  # the loop's own overhead is a large part of them
CASES = {
    "wgan_gp-32": ["--recipe=wgan_gp_mnist"],
    "wgan_gp-64": [
        "--recipe=wgan_gp_photos",
        "--augment=",
        "--diff_augment=",
        "--global_batch_size=32",
    ],
    "dcgan": ["--recipe=dcgan_mnist", "--global_batch_size=64"],
    "cnn": ["--recipe=cnn_mnist", *CONSTANT_RATE],
    "mlp": ["--recipe=mlp_mnist", *CONSTANT_RATE],
    SHORT_STEPS: ["--recipe=wgan_gp_mnist", "--image_size=16", "--global_batch_size=8"],
    LOOPED_MLP: ["--model=mlp", "--data=digits", "--global_batch_size=32", *CONSTANT_RATE],
}
OURS = "ours"
BFLOAT16 = "ours, mixed_bfloat16"
TUTORIAL = "tutorial-style loop"
LOOPED = {
    OURS: "trainer_loop:compiled",
    "a step a program": "trainer_loop:single",
    "Keras fit, 50 steps per execution, XLA": f"keras_fit:{MOST_STEPS}x",
}
CANDIDATES = {
    OURS: "trainer_loop:plain",
    "ours, compiled by XLA": "trainer_loop:compiled",
    "ours, --jit_compile=auto": "trainer_loop:auto",
    BFLOAT16: "trainer_loop:plain",
    TUTORIAL: "tutorial",
    "Keras fit": "keras_fit:1",
    "Keras fit, 10 steps per execution": "keras_fit:10",
    "Keras fit, 10 steps per execution, XLA": "keras_fit:10x",
    "PyTorch eager": "pytorch:eager",
    "PyTorch channels_last": "pytorch:channels_last",
    "PyTorch torch.compile": "pytorch:compile",
}

PARSER = make_parser(__doc__, repeats=5, seconds=3.0)
PARSER.add_argument(
    "--cases", type=some_of(CASES), default=",".join(CASES), help="default: %(default)s"
)


@program
def main() -> None:
    """Prints one table per case and saves the raw numbers."""
    options = PARSER.parse_args()
    raw = {}
    for case in options.cases:
        with digits_file(CASES[case]) as (config, flags):
            makers = {}
            known = LOOPED if case == LOOPED_MLP else CANDIDATES
            for name in (OURS, TUTORIAL) if case == SHORT_STEPS else known:
                own = [*flags, "--precision=mixed_bfloat16"] if name == BFLOAT16 else flags
                # All take a multiple of the steps that a `fit` requires; longer turns would hide
                # the cost of its start.
                steps = MOST_STEPS if known is LOOPED else 10
                makers[name] = partial(
                    Candidate, known[name], own, images_per_step(config), multiple=steps
                )
            with started(possible(makers), options.seconds) as candidates:
                print(f"\nThe step of all: {candidates[OURS].work}")
                raw[case] = alternate(candidates, options.repeats)
        size = f"{config.image_size}x{config.image_size}x{config.channels}"
        title = (
            f"{case}, {size}, batch {config.global_batch_size}, width"
            f" {vars(config).get('width', 64)}"
        )
        print_table(title, table(raw[case], "images/s"))
        save("models", images_per_second=raw)
