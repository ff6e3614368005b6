"""Serves every verb: the console, and the options of verbs as flags, help and arguments of Python
calls."""
