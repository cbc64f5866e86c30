"""The training: its run folder, its trainers, its checkpoints, and the gate before it."""
