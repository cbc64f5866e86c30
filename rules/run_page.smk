# The course of a full training, for people: one self-contained page, the last state of the page in the run folder.
#
# Needs: the full run's report and events, gate and estimate before it, the base model's manifest.
# Makes: reports/run-{run}.html: model, data set and own settings; loss, validation loss, learning rate, gradient norm,
#        speed and waiting as curves; what gate and estimate predicted beside what was measured; the run's former
#        trainings, if stores.runs still has them.
# Holds: the file loads nothing and runs nothing; the same training beside the same former ones gives the same page. No
#        other stage needs it.


rule run_page:
    """Show a run's full training, and what was estimated before it."""
    input:
        smoke="checkpoints/{run}/smoke",
        full="checkpoints/{run}/full",
        estimate=ancient("estimates/{run}.json"),
        model=inputs.model,
    output:
        page=report(
            "reports/run-{run}.html",
            caption="../docs/report/run.rst",
            category="Training",
            subcategory="{run}: full run",
        ),
    log:
        "logs/run_page/{run}.log",
    benchmark:
        "benchmarks/run_page/{run}.tsv"
    params:
        reads="vlmflow/reports/templates",
        dataset=lookup(dpath="runs/{run}/dataset", within=config),
        run_store=lookup(dpath="stores/runs", within=config),
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=1_000,
        runtime=30,
    message:
        "Drawing the page of {wildcards.run}'s full run"
    script:
        "../scripts/stages/run_page.py"
