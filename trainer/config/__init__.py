"""Settings: the fields, their rules, recipes and flags, resolved to one frozen TrainConfig. Imports no TensorFlow."""

from trainer.config.train_config import TrainConfig

__all__ = ["TrainConfig"]
