"""Holds the functions behind the verbs and vertex_trainer: flags, parsed once, and what they ask for."""
