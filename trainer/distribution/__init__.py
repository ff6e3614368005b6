"""Runs one step on one or many devices: the strategy, the step that replicas share, the sum of their gradients."""
