"""Provides the built-in models, one a file: the keyword-only parameters of its `build` are its settings."""
