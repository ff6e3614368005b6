"""Measures on a CPU, before a job is paid for, what a step needs of memory, and counts its work:
`trainer.plan`."""
