"""Holds settings, storage and the files of a run, without TensorFlow: all that deploy uses of
trainer."""
