"""Calls Vertex AI through one protocol: submission, logs, errors, retries, history and costs of jobs."""
