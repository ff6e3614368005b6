"""Vertex AI's API behind one protocol: submission, logs, errors, retries, history and costs of jobs."""
