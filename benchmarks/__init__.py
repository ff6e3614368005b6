"""This project against its peers: each pair in one run, alternating repeats, medians and ratios."""
