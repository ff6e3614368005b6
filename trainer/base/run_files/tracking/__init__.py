"""Shows runs where a team looks: reads the files of a job directory and sends what a tracker does not have yet."""
