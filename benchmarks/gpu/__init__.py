"""Measures what the project itself needs of a lent GPU: `python -m benchmarks.gpu`."""
