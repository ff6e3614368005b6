"""Checks numbers: across all devices and precisions of one machine, and against a golden file recorded earlier."""
