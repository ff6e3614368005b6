"""Defines what the loop needs of a user's model, imports users' functions and reports their
mistakes in one line."""
