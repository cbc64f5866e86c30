"""Snakemake's Kubernetes executor, hardened: pod templates, patience, explanations, clean ends."""
