"""Proves that numbers are what they should be: on the devices of one machine, and on those of another day."""
