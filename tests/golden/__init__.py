"""Holds golden files of the recipes and of examples: `python -m tests.golden` records them anew, or adds this
processor's bits to those that it agrees with.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
_DIGITS = ["--data=digits", "--global_batch_size=8", "--steps=4"]
_SHORT = ["--global_batch_size=8", "--steps=4"]
# Flags that make each run small; the digits of the package stand for data that are not in the tree.
RUNS = {
    "wgan_gp_digits": ["--recipe=wgan_gp_digits", "--steps=8"],
    "wgan_gp_mnist": ["--recipe=wgan_gp_mnist", "--critic_steps=2", "--image_size=16", *_DIGITS],
    "wgan_gp_fashion": ["--recipe=wgan_gp_fashion", "--critic_steps=2", "--image_size=16", *_DIGITS],
    "wgan_gp_photos": ["--recipe=wgan_gp_photos", "--critic_steps=2", "--image_size=16", "--width=4", *_DIGITS],
    "dcgan_mnist": ["--recipe=dcgan_mnist", "--image_size=16", *_DIGITS],
    "r3gan_fashion": ["--recipe=r3gan_fashion", "--image_size=16", *_DIGITS],
    "cnn_mnist": ["--recipe=cnn_mnist", *_DIGITS],
    "cnn_fashion": ["--recipe=cnn_fashion", *_DIGITS],
    "mlp_mnist": ["--recipe=mlp_mnist", *_DIGITS],
    "efficientnet_photos": [
        "--recipe=efficientnet_photos", "--image_size=32", "--variant=B0", "--weights=none", "--fine_tune_from=",
        "--fine_tune_after_steps=0", "--evaluation_fraction=0.1", "--data=digits",
        "--global_batch_size=8", "--steps=1",
    ],
    **{f"examples_{name}": [f"--model=examples.{name}:build", f"--data=examples.{name}:data", *_SHORT]
       for name in ("table", "text", "image_and_metadata", "multi_label", "pytorch_style", "segmentation")},
    "examples_conditional_gan": ["--model=examples.conditional_gan:build", "--image_size=16", *_DIGITS],
    "examples_fine_tuning": [
        "--model=examples.fine_tuning:build", "--image_size=32", "--channels=3", "--weights=none", "--data=digits",
        "--global_batch_size=8", "--steps=1",
    ],
}  # fmt: skip
