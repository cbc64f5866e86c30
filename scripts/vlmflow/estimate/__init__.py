"""Estimates memory, time, price and disk of a run from its settings, the model's config.json and the rows' lengths."""
