# What the train split has in common with the test split, though the bytes differ.
#
# Needs: the validated test rows, the converted train rows, or the validated ones of a mixture, and the accounts with
#        their digests; the image manifests, the picture hashes.
# Makes: data/{dataset}/near_duplicates.jsonl: a line for every train picture that looks like one in the test split, and
#        for every train row without a picture that asks nearly the same as a test row.
# Holds: every train picture within near_duplicates.picture_distance of a test picture is there, with the nearest one.
#        This rule drops nothing: with near_duplicates.drop, validate_sharegpt rejects these rows.

# A mixture has only its train rows: its data sets search their other rows themselves.
is_mixture = lookup(dpath="datasets/{dataset}/mix", within=config, default=None)


rule find_near_duplicates:
    """Name the near-duplicates between the train and the test split."""
    input:
        test_rows="data/{dataset}/test.jsonl",
        train_rows=branch(is_mixture, then="data/{dataset}/train.jsonl", otherwise="converted/{dataset}/train.jsonl"),
        stats="data/{dataset}/stats.json",
        unread=branch(is_mixture, then="data/{dataset}/stats.json", otherwise="converted/{dataset}/train.unread.json"),
        pictures=inputs.manifests,
        hashes=inputs.hashes,
    output:
        pairs="data/{dataset}/near_duplicates.jsonl",
    log:
        "logs/find_near_duplicates/{dataset}.log",
    benchmark:
        "benchmarks/find_near_duplicates/{dataset}.tsv"
    wildcard_constraints:
        dataset=names.datasets,
    params:
        picture_distance=params.dataset("near_duplicates.picture_distance"),
        one_prompt=params.dataset("one_prompt"),
    threads: 1
    resources:
        mem_mb=4_000,
        disk_mb=1_000,
        runtime=60,
    message:
        "Looking for near-duplicates between the splits of {wildcards.dataset}"
    script:
        "../scripts/stages/find_near_duplicates.py"
