"""Names, defines, reads and writes the files of a run, and keeps them in its job directory."""
