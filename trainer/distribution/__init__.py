"""One device or many: the strategy, the step that replicas share, the sum of their gradients."""
