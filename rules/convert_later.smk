# Data sets whose converter is not written yet (Volcano, Alpaca).
#
# Their runs can be planned (`snakemake -n merged/qwen3vl-volcano`). A real run is refused before its first
# job, with the reason, by harness.before_start; this rule says the same where that check is switched off.


use rule fetch_fire as fetch_later with:
    wildcard_constraints:
        dataset=targets.datasets_of_kind(settings, "volcano", "alpaca"),
        file="[^/]+",


rule convert_later:
    """Say that a data set's rows cannot be converted yet."""
    input:
        raw=targets.raw_of(settings),
    output:
        converted="converted/{dataset}/{split}.jsonl",
        rejects="converted/{dataset}/{split}.rejects.jsonl",
    log:
        "logs/convert_later/{dataset}.{split}.log",
    benchmark:
        "benchmarks/convert_later/{dataset}.{split}.tsv"
    wildcard_constraints:
        dataset=targets.datasets_of_kind(settings, "volcano", "alpaca"),
    params:
        code=code("convert_later"),
        kind=lookup(dpath="datasets/{dataset}/kind", within=config),
    threads: 1
    resources:
        mem_mb=1_000,
        disk_mb=1_000,
        runtime=5,
    message:
        "Converting the {wildcards.split} split of {wildcards.dataset}"
    script:
        "../scripts/convert_later.py"
