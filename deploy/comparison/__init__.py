"""Compares tiers: directory, runs on this machine or on Vertex AI, and estimates from short runs."""
