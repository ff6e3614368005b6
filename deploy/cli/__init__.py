"""Implements the command line: one module per verb, with the name of the verb, and the flags that verbs share."""
