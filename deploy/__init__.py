"""What runs at the desk: submits training jobs and compares tiers. Never imports TensorFlow."""
