"""Pinned data files and models, brought into the stores: from the hub, or from this disk."""
