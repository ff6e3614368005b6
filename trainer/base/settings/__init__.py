"""Resolves settings (fields, rules, recipes and flags) to one frozen TrainConfig.

Imports no TensorFlow.
"""
