"""Implements the command line: the verbs, most in a module of their name, and the flags that they
share."""
