"""Measures on a machine with GPUs, in one command, what this project has only read about them."""
