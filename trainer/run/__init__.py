"""Runs one job from top to bottom: set-up, rehearsal, training, export; and reads a finished
one."""
