"""The demo's inputs: a generated sample with faults, and a tiny model."""
