"""Prepares what runs in a job: packages of code, without credentials, and the image that they run
in."""
