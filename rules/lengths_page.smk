# How long the rows of a run are, for people: one self-contained page.
#
# Needs: the lengths of all rows and their account, and the rows that were measured.
# Makes: reports/lengths-{run}.html: tokens of text and pictures as charts, the max_length that covers 99.9 % of train
#        and of val, and all rows, how many rows are longer than the run's own, and the longest rows with their
#        questions.
# Holds: the file loads nothing and runs nothing; the same lengths give the same page. No other stage needs it.


rule lengths_page:
    """Show the tokens of a run's rows, and which max_length they need."""
    input:
        train="lengths/{run}/train.jsonl",
        val="lengths/{run}/val.jsonl",
        summary="lengths/{run}/summary.json",
        train_rows=inputs.data("train.jsonl"),
        val_rows=inputs.data("val.jsonl"),
    output:
        page=report(
            "reports/lengths-{run}.html",
            caption="../docs/report/lengths.rst",
            category="Data",
            labels={"data set": "of {run}", "what": "token lengths"},
        ),
    log:
        "logs/lengths_page/{run}.log",
    benchmark:
        "benchmarks/lengths_page/{run}.tsv"
    params:
        reads="vlmflow/reports/templates",
        max_length=lookup(dpath="runs/{run}/train/max_length", within=config),
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=8_000,
        runtime=30,
    message:
        "Drawing the lengths page of {wildcards.run}"
    script:
        "../scripts/stages/lengths_page.py"
