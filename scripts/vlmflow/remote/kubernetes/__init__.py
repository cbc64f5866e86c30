"""Snakemake's Kubernetes executor, hardened: pod templates, retries of the API, explanations, clean ends."""
