# Rules of seconds for test_slurm_faults.py; all else is the workflow's: executor, harness, configuration, profile. The
# tests copy it beside a link to scripts/.
import sys
from pathlib import Path

ROOT = Path(workflow.basedir, "scripts").resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

from vlmflow.harness import start


configfile: ROOT / "config.yaml"


start.before_rules(workflow, start.read(workflow, config))


# Each start leaves a line in NAME.begun; it ends when NAME.enough is there.
rule waits:
    output:
        "{name}.txt",
    params:
        rate=config["runs"]["qwen3vl-fire"]["train"]["learning_rate"],
    threads: 1
    resources:
        mem_mb=400,
        runtime=10,
    shell:
        "echo $SLURM_JOB_ID >> {wildcards.name}.begun; "
        "until [ -e {wildcards.name}.enough ]; do sleep 0.2; done; date > {output}"


rule follows:
    input:
        "{name}.txt",
    output:
        "{name}.follows",
    threads: 1
    resources:
        mem_mb=400,
        runtime=10,
    shell:
        "date > {output}"


# Its first start fails.
rule stumbles:
    output:
        "{name}.stumbled",
    threads: 1
    resources:
        mem_mb=400,
        runtime=10,
    shell:
        "echo $SLURM_JOB_ID >> {wildcards.name}.begun; [ $(wc -l < {wildcards.name}.begun) -gt 1 ]; date > {output}"


# A stage that fails by its own word.
rule closed:
    output:
        "{name}.closed",
    log:
        "{name}.log",
    params:
        script=ROOT / "tests" / "remote" / "cluster" / "faults" / "closed.py",
    threads: 1
    resources:
        mem_mb=400,
        runtime=10,
    shell:
        "echo $SLURM_JOB_ID >> {wildcards.name}.begun; "
        "PYTHONPATH={ROOT}/scripts {sys.executable} {params.script} --target {output} --log {log}"


onerror:
    start.after_failures(workflow)
