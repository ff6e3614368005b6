"""Trains Keras models on one device, several GPUs or several machines, with the same numbers
everywhere."""

__version__ = "0.4.0"
