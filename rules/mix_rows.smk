# Several data sets as one. This is the data gate of a mixture: its data sets have passed their own.
#
# Needs: the validated rows of the data sets, their accounts, their image manifests.
# Makes: data/{dataset}/{train,val,test}.jsonl: the drawn train rows, and the val and test rows of all; stats.json and
#        counts.html, where every row of the data sets went; quarantine.jsonl, the rows that another data set's test or
#        val keeps out; images/{dataset}/{train,val,test}.jsonl, the entries of the pictures in these rows. The picture
#        store, stores.pictures/{dataset}/, gets a link to that of each data set: no picture is copied or decoded.
# Holds: rows in = rows kept + rejects by reason, exactly, in all and for each data set; no picture, and no prompt of a
#        row without one, is in two splits, whichever data sets have it; the same seed gives the same bytes.


rule mix_rows:
    """Draw train rows of several data sets, keep out what any of them holds out, account for every row."""
    input:
        rows=inputs.of_members("train.jsonl", "val.jsonl", "test.jsonl"),
        accounts=inputs.of_members("stats.json"),
        member_pictures=inputs.member_pictures,
    output:
        "data/{dataset}/train.jsonl",
        "data/{dataset}/val.jsonl",
        "data/{dataset}/test.jsonl",
        "data/{dataset}/quarantine.jsonl",
        stats="data/{dataset}/stats.json",
        counts=report(
            "data/{dataset}/counts.html",
            caption="../docs/report/counts.rst",
            category="Data",
            labels={"data set": "{dataset}", "what": "where every row went"},
        ),
        manifests=expand("images/{{dataset}}/{split}.jsonl", split=["train", "val", "test"]),
    log:
        "logs/mix_rows/{dataset}.log",
    benchmark:
        "benchmarks/mix_rows/{dataset}.tsv"
    wildcard_constraints:
        dataset=names.mixtures,
    params:
        mix=params.dataset("mix"),
        seed=params.dataset("seed"),
        picture_store=lookup(dpath="stores/pictures", within=config),
    threads: 1
    resources:
        mem_mb=4_000,
        disk_mb=16_000,
        runtime=60,
    message:
        "Mixing {wildcards.dataset}"
    script:
        "../scripts/stages/mix_rows.py"
