"""Reads each kind of data in one module; batches.py assigns the rows of each step to replicas."""
