"""Holds the programs that run inside a job. They need only the standard library and
trainer/base/limit_watch.py."""
