"""Measures what a run trained: evaluation, predictions and the quality of generated images."""
