"""Runs a study: trials of one recipe with other settings, here or on Vertex AI, and says what came out of them."""
