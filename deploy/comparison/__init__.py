"""Runs a comparison of tiers: its folder, and its runs on this machine or on Vertex AI."""
