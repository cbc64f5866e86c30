"""From raw rows to verified merged weights: the code behind the rules. What each folder holds, in the order of imports:

core        errors, files, accounts, digests, processes, progress
config      the settings and their checks, the repository's tables, and the messages about errors
raw         the rows of raw files of every format, one after the other, and which of them are used
pictures    the pictures that rows name: found, checked, stored under one name everywhere
fetch       downloads: pinned files and models of the hub, and pictures from their archives
rows        raw rows to training rows, each kept or rejected for a reason; rows/forms has a module for each raw form
swift       ms-swift: its arguments, its processes, and what transformers and its templates say of a model
lengths     the tokens of rows: counted, compared with ms-swift's, and made to fit
in_trainer  a training from inside: our callbacks, in every process that torchrun starts
supervisor  a training from outside: trainers are started, watched and resumed, a smoke run judged, the result reported
estimate    memory, time, price and disk of a run, before it starts
merging     the adapter into the base's weights, and the proof of the result
serving     a model folder for people and stages: transformers on the CPU, vLLM on GPUs
evaluation  is the tuned model better than its base, does it use feedback; scoring of answers by rules
search      a search for a run's settings
reports     pages, summary, provenance, model card
publish     verified weights to the hub
track       a finished run to MLflow, Weights & Biases, OpenTelemetry
demo        a generated sample with faults, and a tiny model
harness     what ties the rules to the library: with remote the only code that knows Snakemake
remote      jobs and targets elsewhere: Kubernetes, Slurm, S3
tools       the work behind the words of `vlmflow` (command.py)
"""

from pathlib import Path

__version__ = "0.1.0"

_HERE = Path(__file__).absolute().parent

CHECKOUT = _HERE / "workflow" if (_HERE / "workflow").is_dir() else _HERE.parents[1]
"""The folder of the project's other files: the Snakefile, config.yaml, profiles, tables, environments.

A clone, or in an installed package its folder `workflow`. Both hold rules/ and scripts/, and the rules' programs.
"""

SCRIPTS = CHECKOUT / "scripts"
"""The folder from which programs of ours import. It is in no site-packages, of which another environment must see
nothing: an installed package has this file in it again, for which `PACKAGE` has the modules."""

PACKAGE = _HERE if (_HERE / "core").is_dir() else _HERE.parents[2]
"""The folder of our modules."""

__path__ = [str(PACKAGE)]
