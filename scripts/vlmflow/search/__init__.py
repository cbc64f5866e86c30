"""A search for a run's settings: what is asked of each trial, what it answered, and the study that learns from it."""
