"""Fetches pictures from their sources: which source has them, the cheapest way, and an account of the result."""
