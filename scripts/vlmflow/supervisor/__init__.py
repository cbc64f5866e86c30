"""Supervises a training, outside torchrun: starts, watches and resumes its trainers, judges it and reports it."""
