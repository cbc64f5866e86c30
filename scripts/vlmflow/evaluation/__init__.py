"""Whether a tuned model is better than its base, and whether it uses feedback."""
