"""Submits training jobs and compares tiers, on the user's machine. Never imports TensorFlow."""
