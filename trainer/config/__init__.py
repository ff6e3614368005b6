"""Resolves settings (fields, rules, recipes and flags) to one frozen TrainConfig. Imports no TensorFlow."""

from trainer.config.train_config import TrainConfig

__all__ = ["TrainConfig"]
