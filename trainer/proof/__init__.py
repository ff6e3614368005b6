"""Proves by the graph of a step that the number of replicas changes none of its updates."""
