"""Measures what a run trained: evaluation, predictions, quality of images, profiles of steps."""
