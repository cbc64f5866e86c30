"""The library behind the stages: plain functions on paths and values that know nothing of Snakemake."""
