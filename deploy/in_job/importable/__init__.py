"""Holds the one file that a user's script can import."""
