"""Job directories, read and turned into rows, words, tables, figures and one HTML page."""
