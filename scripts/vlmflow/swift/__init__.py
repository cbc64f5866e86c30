"""Runs ms-swift in separate processes: its arguments, its environment, and its output."""
