"""Scores of answers by rules, without a judge: pure functions of texts."""
