"""Trains any model that has a Keras train_step; imports no model."""
