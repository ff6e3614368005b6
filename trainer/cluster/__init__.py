"""Finds the devices and workers of a run: TF_CONFIG, the strategy over them, the meeting before TensorFlow starts."""
