"""Proves that numbers are what they should be: golden runs, and an audit that trains stretches of a run again."""
