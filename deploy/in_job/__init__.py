"""Holds the programs that run inside a job, by the standard library alone, with one more file: the watch of limits."""
