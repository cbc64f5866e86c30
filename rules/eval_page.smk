# The evaluation of a run, for people: one self-contained page.
#
# Needs: the run's evaluations on val, or on the splits of `evaluate.splits`; their rows and pictures; with
#        `evaluate.answers` also what both models answered.
# Makes: reports/eval-{run}.html: the verdict in a sentence, the figures with their intervals as a picture, in all and
#        by source, and the rows with most gain and most loss, with their pictures and answers.
# Holds: the file loads nothing and runs nothing; texts are escaped, pictures are new JPEGs of their pixels; the same
#        evaluation gives the same page. No other stage needs it.


rule eval_page:
    """Show whether a run's model is better than its base."""
    input:
        evaluated=inputs.evaluated,
        rows=inputs.evaluated_rows,
        answered=inputs.answered,
        stats=inputs.data("stats.json"),
        pictures=inputs.run_pictures,
    output:
        page=report(
            "reports/eval-{run}.html",
            caption="../docs/report/eval.rst",
            category="Evaluation",
            labels={"run": "{run}"},
        ),
    log:
        "logs/eval_page/{run}.log",
    benchmark:
        "benchmarks/eval_page/{run}.tsv"
    params:
        reads="vlmflow/reports/templates",
        picture_limits=params.run("dataset.picture_limits"),
        picture_store=lookup(dpath="stores/pictures", within=config),
    threads: 1
    resources:
        mem_mb=4_000,  # one picture of the largest max_pixels at a time
        disk_mb=1_000,
        runtime=30,
    message:
        "Drawing the evaluation page of {wildcards.run}"
    script:
        "../scripts/stages/eval_page.py"
