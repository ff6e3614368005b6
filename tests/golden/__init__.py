"""Holds golden files of the recipes and of examples: `python -m tests.golden` records them anew, or
adds this
processor's bits to those that it agrees with.

A golden file holds the numbers of a run's first steps in float64. A run that is compared with it
has equal bits, or rounding (within three times what another order of the rows does), or is CHANGED:
from which step, in which tensor.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
_NARROW = "--width=8"
_DIGITS = ["--data=digits", "--global_batch_size=8", "--steps=4", "--precision=float64"]
# The recipes of `cnn` warm up for 50 steps, which a run must have; only its first 4 are trained.
_WARMED_UP = ["--data=digits", "--global_batch_size=8", "--steps=50", "--precision=float64"]
_SHORT = ["--global_batch_size=8", "--steps=4", "--precision=float64"]
# Flags that make each run small; the digits of the package stand for data that are not in the tree.
RUNS = {
    "wgan_gp_digits": [
        "--recipe=wgan_gp_digits",
        "--steps=8",
        "--precision=float64",
        "--global_batch_size=16",
        _NARROW,
    ],
    "wgan_gp_mnist": [
        "--recipe=wgan_gp_mnist",
        "--critic_steps=2",
        "--image_size=16",
        *_DIGITS,
        _NARROW,
    ],
    "wgan_gp_fashion": [
        "--recipe=wgan_gp_fashion",
        "--critic_steps=2",
        "--image_size=16",
        *_DIGITS,
        _NARROW,
    ],
    "wgan_gp_photos": [
        "--recipe=wgan_gp_photos",
        "--critic_steps=2",
        "--image_size=16",
        "--width=4",
        *_DIGITS,
    ],
    "dcgan_mnist": ["--recipe=dcgan_mnist", "--image_size=16", *_DIGITS, _NARROW],
    "r3gan_fashion": ["--recipe=r3gan_fashion", "--image_size=16", *_DIGITS, _NARROW],
    "cnn_mnist": ["--recipe=cnn_mnist", *_WARMED_UP, _NARROW],
    "cnn_fashion": ["--recipe=cnn_fashion", *_WARMED_UP, _NARROW],
    "mlp_mnist": ["--recipe=mlp_mnist", *_DIGITS, _NARROW],
    "efficientnet_photos": [
        "--recipe=efficientnet_photos",
        "--image_size=32",
        "--variant=B0",
        "--weights=none",
        "--fine_tune_from=",
        "--fine_tune_after_steps=0",
        "--evaluation_fraction=0.1",
        "--data=digits",
        "--global_batch_size=8",
        "--steps=1",
        "--precision=float64",
    ],
    **{
        f"examples_{name}": [
            f"--model=examples.{name}:build",
            f"--data=examples.{name}:data",
            *_SHORT,
        ]
        for name in (
            "table",
            "text",
            "image_and_metadata",
            "multi_label",
            "pytorch_style",
            "segmentation",
        )
    },
    "examples_conditional_gan": [
        "--model=examples.conditional_gan:build",
        "--image_size=16",
        *_DIGITS,
    ],
    "examples_fine_tuning": [
        "--model=examples.fine_tuning:build",
        "--image_size=32",
        "--channels=3",
        "--weights=none",
        "--data=digits",
        "--global_batch_size=8",
        "--steps=1",
        "--precision=float64",
    ],
}
