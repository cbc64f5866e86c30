# From raw rows to verified merged weights. docs/design.md shows the pipeline, docs/outputs.md the contract of targets.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))

from harness import read_config, start
from vlmflow.config.run_blocks import EstimateBlock, EvaluationBlock, LengthBlock, TrainBlock


configfile: Path(workflow.basedir) / "config.yaml"


container: "docker://vlmflow/train:0.1.0"  # only for --sdm apptainer; otherwise the environment, or the pod's image


settings = start.before_rules(workflow, read_config.read(workflow, config))
config = settings.model_dump(mode="json")
names, inputs, params, resources = start.for_rules(workflow, settings)


wildcard_constraints:
    **names.constraints(),


rule all:
    """Make the verified merged weights of the runs in your --configfile, else of all, and the pages of their data."""
    default_target: True
    input:
        inputs.everything(),
    localrule: True


include: "rules/fetch_rows.smk"
include: "rules/fetch_model.smk"
include: "rules/fetch_model_files.smk"
include: "rules/fetch_images.smk"
include: "rules/resolve_images.smk"
include: "rules/hash_pictures.smk"
include: "rules/convert_rows.smk"
include: "rules/validate_sharegpt.smk"
include: "rules/mix_rows.smk"
include: "rules/find_near_duplicates.smk"
include: "rules/data_page.smk"
include: "rules/measure_lengths.smk"
include: "rules/lengths_page.smk"
include: "rules/estimate_run.smk"
include: "rules/estimate_page.smk"
include: "rules/fit_rows.smk"
include: "rules/train_smoke.smk"
include: "rules/train_model.smk"
include: "rules/run_page.smk"
include: "rules/merge_weights.smk"
include: "rules/verify_tensors.smk"
include: "rules/verify_merged.smk"
include: "rules/evaluate.smk"
include: "rules/answer.smk"
include: "rules/eval_page.smk"
include: "rules/publish_merged.smk"
include: "rules/track.smk"
include: "rules/propose.smk"
include: "rules/trial.smk"
include: "rules/tell.smk"
include: "rules/judge_best.smk"
include: "rules/choose_best.smk"
include: "rules/search_page.smk"


onstart:
    start.before_jobs(workflow, settings)


onsuccess:
    start.after_success(workflow, settings)


onerror:
    start.after_failures(workflow)
