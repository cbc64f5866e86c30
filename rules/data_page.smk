# A data set's content, for people: one self-contained page.
#
# Needs: the validated rows, their account, the rejected rows, the near-duplicates, the image manifests, the picture
#        store.
# Makes: reports/data-{dataset}.html: where every raw row went and why, charts of rows and pictures, the
#        near-duplicates of the test split, sample conversations with their pictures, the first rejected rows of every
#        reason with their place in the file.
# Holds: the file loads nothing and runs nothing; texts are escaped, pictures are new JPEGs of their pixels; the
#        same data gives the same page. No other stage needs it.


rule data_page:
    """Show a data set: counts, losses, charts, samples, rejects."""
    input:
        expand("data/{{dataset}}/{file}.jsonl", file=["train", "val", "test", "quarantine", "near_duplicates"]),
        stats="data/{dataset}/stats.json",
        pictures=inputs.manifests,
    output:
        page=report(
            "reports/data-{dataset}.html",
            caption="../docs/report/data.rst",
            category="Data",
            labels={"data set": "{dataset}", "what": "what it holds"},
        ),
    log:
        "logs/data_page/{dataset}.log",
    benchmark:
        "benchmarks/data_page/{dataset}.tsv"
    wildcard_constraints:
        dataset=names.datasets,
    params:
        reads="vlmflow/reports/templates",
        picture_store=lookup(dpath="stores/pictures", within=config),
        picture_limits=params.dataset("picture_limits"),
        near_duplicates=params.dataset("near_duplicates"),
        good_run=params.good_run,
    threads: 1
    resources:
        mem_mb=4_000,  # one picture of the largest max_pixels at a time
        disk_mb=1_000,
        runtime=30,
    message:
        "Drawing the data page of {wildcards.dataset}"
    script:
        "../scripts/stages/data_page.py"
