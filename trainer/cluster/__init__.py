"""Finds the devices and workers of a run: TF_CONFIG, the strategy, the rendezvous before TensorFlow
starts."""
