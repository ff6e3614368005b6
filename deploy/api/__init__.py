"""Holds the functions behind the verbs and vertex_trainer, and the flags that both take."""
