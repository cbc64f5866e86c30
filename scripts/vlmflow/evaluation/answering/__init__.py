"""Asks base and tuned model the same questions, and scores their answers."""
