"""Holds the programs that run inside a job without any other part of this package: the standard library alone."""
