"""Holds problems of one's own, one a file, to start from: each begins with its command."""
