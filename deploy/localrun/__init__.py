"""Runs a job's workers as local processes, in the environment that Vertex AI gives them."""
