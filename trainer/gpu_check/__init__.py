"""Proves on the devices of one machine that they compute alike, and measures how fast: `trainer.check --on_gpus`."""
