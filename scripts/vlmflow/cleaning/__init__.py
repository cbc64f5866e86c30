"""Finds what a finished workflow no longer needs."""
