"""The library behind the stages: plain functions on paths and values that know nothing of Snakemake."""

from pathlib import Path

SCRIPTS = Path(__file__).absolute().parents[1]
"""The folder from which programs of ours import."""

CHECKOUT = SCRIPTS.parent
"""The folder of the project's other files: the Snakefile, config.yaml, profiles, tables, environments."""
