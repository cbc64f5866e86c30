"""Tells trackers about a finished run: MLflow, Weights & Biases, OpenTelemetry."""
