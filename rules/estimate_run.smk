# The memory, time and price of a run, before a GPU is requested.
#
# Needs: the lengths of all rows and their account; the base model's config.json. No weights.
# Makes: estimates/{run}.json: memory per GPU by part, steps, operations, hours and price on GPU products, disk, and
#        what would make the run fit.
# Holds: nothing is measured on a GPU: a pass without data gives its memory, arithmetic the rest. A run that needs more
#        than 110 % of the memory of its GPU (runs.NAME.gpu) is refused here, with what would make it fit, unless
#        runs.NAME.estimate is ignore; above 90 % there is a warning.


rule estimate_run:
    """Estimate memory, time and price of a run; refuse one that does not fit its GPU."""
    input:
        train="lengths/{run}/train.jsonl",
        val="lengths/{run}/val.jsonl",
        summary="lengths/{run}/summary.json",
        model_files=inputs.model_files,
    output:
        estimate="estimates/{run}.json",
    log:
        "logs/estimate_run/{run}.log",
    benchmark:
        "benchmarks/estimate_run/{run}.tsv"
    params:
        settings=params.run(*params.estimated),
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=1_000,
        runtime=30,
        pod_template="train",
    message:
        "Estimating memory and time of {wildcards.run}"
    script:
        "../scripts/stages/estimate_run.py"
