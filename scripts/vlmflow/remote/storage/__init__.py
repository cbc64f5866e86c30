"""Stores targets completely or not at all; replaces the storage plugins' own steps."""
