"""Provides the built-in models: the keyword-only parameters of the function or class of a model are
its settings."""
