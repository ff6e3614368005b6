"""Checks numbers across all devices and precisions of one machine."""
