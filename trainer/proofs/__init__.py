"""Proves that numbers are what they should be: on the devices of one machine, of another day, of another's run."""
