"""The workers of a job as processes of this machine, in the environment that Vertex AI gives them."""
