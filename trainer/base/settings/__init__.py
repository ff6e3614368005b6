"""Resolves settings (fields, rules, recipes and flags) to one frozen TrainConfig. Imports no TensorFlow."""

from trainer.base.settings.train_config import TrainConfig

__all__ = ["TrainConfig"]
