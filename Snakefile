# From raw rows to verified merged weights. docs/design.md shows the pipeline, docs/outputs.md the contract of targets.
import sys
from pathlib import Path

if not (Path(workflow.basedir) / "scripts" / "vlmflow").is_dir():
    sys.exit(
        "vlmflow: Snakemake cannot fetch it by an address, nor use it as a module: install it with pip, and write "
        "`vlmflow run FILE`, in another workflow as a rule's shell command"
    )

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))

from vlmflow.harness import start


configfile: Path(workflow.basedir) / "config.yaml"


container: "docker://vlmflow/train:0.1.0"  # only for --sdm apptainer; otherwise the environment, or the pod's image


settings = start.before_rules(workflow, start.read(workflow, config))
config = settings.model_dump(mode="json")
lookup = start.lookup
names, inputs, params, resources = start.for_rules(workflow, settings)


wildcard_constraints:
    **names.constraints(),


rule all:
    """Make the verified merged weights of the runs in your --configfile, else of all, and the pages of their data."""
    default_target: True
    input:
        inputs.everything(),
    localrule: True


# What others made: downloaded once, with a digest of each file.
include: "rules/fetch_rows.smk"  # raw rows
include: "rules/fetch_model.smk"  # base model
include: "rules/fetch_model_files.smk"  # base model without its weights
include: "rules/fetch_images.smk"  # pictures
# Rows to trust: each is kept or rejected for a stated reason, and every picture opens.
include: "rules/resolve_images.smk"  # the pictures that rows name, into one store
include: "rules/hash_pictures.smk"  # how pictures look
include: "rules/convert_rows.smk"  # raw rows to ShareGPT rows
include: "rules/validate_sharegpt.smk"  # the gate of a data set
include: "rules/mix_rows.smk"  # several data sets as one
include: "rules/find_near_duplicates.smk"  # what train and test have in common
include: "rules/data_page.smk"  # page: the data set
# What the training will take: tokens, memory, hours.
include: "rules/measure_lengths.smk"  # the tokens of every row
include: "rules/fit_rows.smk"  # the rows that fit max_length
include: "rules/choose_rows.smk"  # the rows that will judge it
include: "rules/estimate_run.smk"  # memory, time and price
include: "rules/lengths_page.smk"  # page: the lengths
include: "rules/estimate_page.smk"  # page: the estimate
# The training: a short run with the same settings must pass before the full one.
include: "rules/train_smoke.smk"  # the gate of a run
include: "rules/train_model.smk"  # checkpoints/RUN/full
include: "rules/run_page.smk"  # page: the training
# Merged weights, proven by code that shares none with the merge.
include: "rules/merge_weights.smk"  # base + adapter
include: "rules/verify_tensors.smk"  # every tensor is what it should be
include: "rules/verify_merged.smk"  # the same answers as the trained model
include: "rules/publish_merged.smk"  # merged/RUN, with its model card
# Is it better than its base?
include: "rules/evaluate.smk"  # losses on rows that it was not trained on
include: "rules/answer.smk"  # answers, at first and after feedback
include: "rules/eval_page.smk"  # page: the evaluation
include: "rules/track.smk"  # the run in MLflow and other trackers
# A search for better settings: propose, try, learn, propose again.
include: "rules/propose.smk"  # settings to try
include: "rules/trial.smk"  # a short training with them
include: "rules/tell.smk"  # what the trials taught
include: "rules/judge_best.smk"  # the best against the run's own settings
include: "rules/choose_best.smk"  # the best, as an overlay
include: "rules/search_page.smk"  # page: the search


onstart:
    start.before_jobs(workflow, settings)


onsuccess:
    start.after_success(workflow, settings)


onerror:
    start.after_failures(workflow)
