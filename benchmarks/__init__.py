"""Measures this project against its peers: alternating repeats within one run, medians and
ratios."""
