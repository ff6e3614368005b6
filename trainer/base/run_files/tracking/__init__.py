"""Logs runs to experiment trackers: reads the files of a job directory and sends what a tracker
does not have yet."""
