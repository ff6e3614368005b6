"""Holds what needs no TensorFlow, settings, storage and the files of a run: all that deploy uses of trainer."""
