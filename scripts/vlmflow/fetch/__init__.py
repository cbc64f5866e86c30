"""Fetches pinned data files and models into the stores: from the hub, or from this disk."""
