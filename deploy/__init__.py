"""Submits training jobs and compares tiers, on the user's machine. Never imports TensorFlow."""

import trainer  # noqa: F401 - it says first if no environment is active
