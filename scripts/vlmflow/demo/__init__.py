"""What the demo starts from: a generated sample with faults, and a tiny model."""
