"""The training: its job, its run folder, its processes, and the gate before it."""
