"""A study: trials of one recipe with other settings, run here or on Vertex AI, and what came out of them."""
