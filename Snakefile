# From raw FIRE to verified merged weights. docs/design.md holds the road and the contract of every target.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))

from harness import code_digest, read_config, start, targets


configfile: Path(workflow.basedir) / "config.yaml"


# For --sdm apptainer alone; without it a rule runs in the environment, or the pod's image, it is started in.
container: "docker://vlmflow/train:0.1.0"


settings = read_config.read(workflow, config)
config = settings.model_dump(mode="json")
code = code_digest.of_scripts(Path(workflow.basedir) / "scripts")
start.before_rules(workflow, settings)


wildcard_constraints:
    run=targets.one_of(settings.runs),
    model=targets.one_of(settings.models),
    dataset=targets.one_of(settings.datasets),
    split="train|test",


rule all:
    """Verified merged weights of every run in the configuration."""
    default_target: True
    input:
        expand("merged/{run}", run=settings.runs),
    localrule: True


include: "rules/fetch_fire.smk"
include: "rules/fetch_model.smk"
include: "rules/resolve_images.smk"
include: "rules/convert_fire.smk"
include: "rules/convert_later.smk"
include: "rules/validate_sharegpt.smk"
include: "rules/train_smoke.smk"
include: "rules/train_lora.smk"
include: "rules/merge_lora.smk"
include: "rules/verify_merged.smk"


onstart:
    start.before_jobs(workflow, settings)


onerror:
    start.after_failure(workflow)
