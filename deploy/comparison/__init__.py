"""A comparison of tiers: its directory, its runs on this machine or on Vertex AI, and estimates from short runs."""
