# The rows of a run as ms-swift's cached data set, for runs with cached_dataset.
#
# Needs: rows that fit max_length, with their lengths; their pictures in the store, the base model's processor.
# Makes: cached/{run}/train and cached/{run}/val, the output of `swift export --to_cached_dataset`: rows in
#        ms-swift's form, shuffled with the run's seed, and their lengths, of which packs are made. Pictures stay in
#        the store.
# Holds: as many rows as fit_rows gave, with exactly its lengths; training from it gives the same losses; the same
#        bytes on any number of cores.


rule cache_dataset:
    """Let ms-swift read all rows and pictures once, without a GPU."""
    input:
        rows="fitted/{run}",
        pictures=inputs.train_pictures,
        model=inputs.model,
    output:
        cached=directory("cached/{run}"),
    log:
        "logs/cache_dataset/{run}.log",
    benchmark:
        "benchmarks/cache_dataset/{run}.tsv"
    params:
        settings=params.run(
            *("train.max_length", "train.image_max_tokens", "train.seed", "train.dtype", "train.text_args"),
            "model.model_type",
        ),
        picture_store=lookup(dpath="stores/pictures", within=config),
    threads: 8
    resources:
        mem_mb=16_000,
        disk_mb=16_000,
        runtime=240,
        pod_template="train",
    message:
        "Caching the data set of {wildcards.run}"
    script:
        "../scripts/cache_dataset.py"
