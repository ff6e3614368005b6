"""Holds the programs that run inside a job. They need the standard library alone, and trainer/base/limit_watch.py."""
