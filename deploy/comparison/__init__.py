"""Compares tiers: directory, runs on this machine or on Vertex AI."""
