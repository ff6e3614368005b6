"""Reaches where jobs run: Vertex AI with its buckets and registry, and the processes of this
machine."""
