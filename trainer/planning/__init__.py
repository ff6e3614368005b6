"""Measures on a CPU what a training step needs of memory, and counts its work, before a job is paid for: `trainer.plan`."""
