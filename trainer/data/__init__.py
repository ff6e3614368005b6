"""Reads data of every kind (sources.py), and assigns the rows of each step to replicas
(batches.py)."""
