"""Training: run folder, trainers, checkpoints, and the gate before the full run."""
