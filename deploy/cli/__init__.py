"""Implements the command line: one module a verb, named as the verb, and the flags that verbs share."""
