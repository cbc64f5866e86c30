# The estimate of a run, for people: one self-contained page.
#
# Needs: what estimate_run needs.
# Makes: reports/estimate-{run}.html: memory per GPU by part, hours and price by GPU product, steps, disk, and what
#        would make the run fit, the cheapest first.
# Holds: it refuses no run: it shows why estimate_run does. The file loads nothing and runs nothing.


rule estimate_page:
    """Show memory, time and price of a run, and what would make it fit."""
    input:
        train="lengths/{run}/train.jsonl",
        val="lengths/{run}/val.jsonl",
        summary="lengths/{run}/summary.json",
        model_files=inputs.model_files,
    output:
        page=report(
            "reports/estimate-{run}.html",
            caption="../docs/report/estimate.rst",
            category="Training",
            subcategory="{run}: estimate",
        ),
    log:
        "logs/estimate_page/{run}.log",
    benchmark:
        "benchmarks/estimate_page/{run}.tsv"
    params:
        reads="vlmflow/reports/templates",
        settings=params.run(*params.estimated),
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=1_000,
        runtime=30,
        pod_template="train",
    message:
        "Drawing the estimate of {wildcards.run}"
    script:
        "../scripts/stages/estimate_page.py"
