"""The loop that drives any model with a Keras train_step; it imports no model."""
