"""Sends a run's verified weights to the hub, and nothing else."""
