"""Predicts, before a job is paid for, whether it fits a tier's GPUs, how long it takes and what it
costs."""
