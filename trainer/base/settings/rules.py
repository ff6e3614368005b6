"""Checks the settings of a run against each other, and against what a built-in model needs. Imports no TensorFlow."""

import os
from collections.abc import Callable, Mapping, Sequence

from trainer.base.errors import UnknownData, UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.metric_names import CLASSIFIERS, check_metric_names
from trainer.base.settings.train_config import (
    AUGMENTATIONS,
    DATA_SOURCES,
    DIFF_AUGMENTATIONS,
    GANS,
    MODELS,
    TrainConfig,
)
from trainer.base.storage import local_path

# EfficientNet without weights, overriding the fine-tuning of a recipe.
FROM_SCRATCH = "--weights=none --fine_tune_from= --fine_tune_after_steps=0"


def _efficientnet(config: TrainConfig) -> None:
    if config.channels != 3:
        raise UserError(f"channels={config.channels}: efficientnet takes colour images: use --channels=3")
    if config.image_size < 32:
        raise UserError(f"image_size={config.image_size}: efficientnet needs at least 32 pixels")
    if config.fine_tune_after_steps and not config.fine_tune_from:
        raise UserError(
            f"fine_tune_after_steps={config.fine_tune_after_steps} without fine_tune_from: name the first block to "
            f"train then, for example --fine_tune_from=block6a, or train everything from scratch: {FROM_SCRATCH}"
        )
    if config.weights == "none" and config.fine_tune_from:
        raise _contradiction(
            config, "weights", "fine_tune_from", f"without weights everything is trained: use {FROM_SCRATCH}"
        )


def _cnn(config: TrainConfig) -> None:
    if config.image_size < 20:
        raise UserError(f"image_size={config.image_size}: cnn needs at least 20 pixels")


def _gan_images(config: TrainConfig) -> None:
    size = config.image_size
    if size % 8 or not 16 <= size <= 256:
        near = sorted({str(min(max(near, 16), 256)) for near in (size // 8 * 8, size // 8 * 8 + 8)})
        raise UserError(
            f"image_size={size}: {config.model} needs a multiple of 8 from 16 to 256: take {' or '.join(near)}"
        )


# What a built-in model needs of the settings, checked before TensorFlow is loaded.
MODEL_RULES: Mapping[str, Callable[[TrainConfig], None]] = {
    **dict.fromkeys(GANS, _gan_images),
    "cnn": _cnn,
    "efficientnet": _efficientnet,
}


def check(config: TrainConfig) -> None:
    """Raises UserError if the settings contradict each other, or do not fit the built-in model."""
    _known_name("model", config.model, MODELS)
    _check_data(config)
    _check_devices(config)
    if config.initial_checkpoint and config.initial_model:
        raise _contradiction(config, "initial_checkpoint", "initial_model", "drop one of them")
    if config.fine_tune_after_steps and config.model in MODELS and config.model != "efficientnet":
        raise UserError(
            f"fine_tune_after_steps={config.fine_tune_after_steps}: {config.model} has no layers to train later, "
            "only efficientnet has: drop it, or use --fine_tune_after_steps=0 if a recipe sets it"
        )
    if config.model in MODEL_RULES:
        MODEL_RULES[config.model](config)
    if config.profiled and config.steps and config.profiled[-1] > config.steps:
        raise UserError(
            f"profile_steps={config.profile_steps}, but the run ends at step {config.steps}: take earlier ones"
        )
    _check_classes(config)
    _known_augmentations("diff_augment", config.diff_augment, config.diff_augmentations, DIFF_AUGMENTATIONS)
    if config.diff_augment and config.model in MODELS and config.model not in GANS:
        raise UserError(
            f"diff_augment={config.diff_augment}: {config.model} has no critic, only {', '.join(GANS)} have: drop it, "
            "or change the training images by --augment"
        )
    check_metric_names(config)


def _check_data(config: TrainConfig) -> None:
    if config.channels == 2:
        raise UserError("channels=2: images have 1 channel (grey) or 3 (colour)")
    if not config.data:
        raise UserError(
            "data is missing: use --data=FOLDER (or gs://BUCKET/FOLDER) with your images, one folder a class for a "
            "classifier, or --data=digits to try the recipe without any"
        )
    if not any(sign in config.data for sign in "/.\\") and not os.path.exists(config.data):
        _known_name("data", config.data, DATA_SOURCES)
    _known_augmentations("augment", config.augment, config.augmentations, AUGMENTATIONS)
    local_path(config.cache_dir, "cache_dir")  # raises UserError for an address


def _known_augmentations(setting: str, value: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{setting}={value}: no such augmentation{nearest(name, known)} Known: {', '.join(known)}")


def _check_devices(config: TrainConfig) -> None:
    if config.strategy == "one_device" and config.replicas > 1:
        raise _contradiction(config, "strategy", "replicas", "drop one of them")
    if config.strategy == "one_device" and config.expect_devices > 1:
        raise _contradiction(config, "strategy", "expect_devices", "drop one of them")
    if 0 < config.replicas < config.expect_devices:
        raise _contradiction(config, "replicas", "expect_devices", "devices that are paid for would not be used")
    config.rows_per_replica(config.replicas or 1)


def _contradiction(config: TrainConfig, one: str, other: str, advice: str) -> UserError:
    both = f"{one}={getattr(config, one)} and {other}={getattr(config, other)}"
    return UserError(f"{both} contradict each other: {advice}")


def _check_classes(config: TrainConfig) -> None:
    if config.class_weights and config.model in GANS:
        raise UserError(f"class_weight={config.class_weight}: the losses of {config.model} have no classes: drop it")
    if config.conditional and config.model in MODELS and config.model not in GANS:
        raise UserError(
            f"conditional=true: {config.model} is no GAN, only {', '.join(GANS)} are: use --conditional=false"
        )
    if (config.label_smoothing or config.mixup) and config.model not in CLASSIFIERS:
        name = "label_smoothing" if config.label_smoothing else "mixup"
        raise UserError(
            f"{name}={getattr(config, name)}: only {', '.join(CLASSIFIERS)} have soft labels: drop it; a model of your "
            "own may have them in its loss or its data"
        )


def _known_name(kind: str, name: str, known: Mapping[str, str]) -> None:
    if ":" not in name and name not in known:
        path = "an existing path, " if kind == "data" else ""
        text = (
            f"{kind}={name}: no such {kind}{nearest(name, known)} "
            f"Known: {', '.join(known)}, {path}or your own package.module:function"
        )
        raise UnknownData(text, name) if kind == "data" else UserError(text)
