"""One file per data source, and batches.py: which rows of which step go to which replica."""
