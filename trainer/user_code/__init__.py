"""Asks what the loop needs of a user's model and data, imports their functions and tells their mistakes in one line."""
