# Converted rows to the data that a run trains on. The gate: nothing downstream runs on data that did not pass.
#
# Needs: of every raw split the raw files, the converted rows, the converter's rejects and its account of what nobody
#        reads, and where its rows have pictures, the image manifest; an edited quarantine, where there is one; with
#        near_duplicates.drop the picture hashes.
# Makes: data/{dataset}/{train,val,test}.jsonl; stats.json and counts.html, where every raw row went;
#        quarantine.jsonl, the rejected rows with split, row number and reason.
# Holds: rows in = rows kept + rejects by reason, exactly; every row fits docs/sharegpt-row.schema.json and the
#        rules beyond it; no picture and no prompt of a row without is in two splits; no duplicates; too many rejects,
#        or no rows, is an error.


rule validate_sharegpt:
    """Check every row, hold out val (and test, if it has no file) by picture or prompt, account for every raw row."""
    input:
        raw_train=targets.raw_of(settings, "train"),
        raw_test=targets.raw_of(settings, "test"),
        raw_accounts=targets.raw_accounts_of(settings),
        converted=targets.per_split(settings, "converted/{dataset}/{split}.jsonl"),
        rejects=targets.per_split(settings, "converted/{dataset}/{split}.rejects.jsonl"),
        unread=targets.per_split(settings, "converted/{dataset}/{split}.unread.json"),
        pictures=targets.manifests_of(settings),
        mended=targets.mended_of(workflow, settings),
        hashes=targets.hashes_to_drop_by(settings),
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
    log:
        "logs/validate_sharegpt/{dataset}.log",
    benchmark:
        "benchmarks/validate_sharegpt/{dataset}.tsv"
    params:
        code=code("validate_sharegpt"),
        form=lookup(dpath="datasets/{dataset}/form", within=config),
        max_history_rounds=lookup(dpath="datasets/{dataset}/max_history_rounds", within=config),
        modality=lookup(dpath="datasets/{dataset}/modality", within=config),
        skip_images=lookup(dpath="datasets/{dataset}/skip_images", within=config),
        kind=lookup(dpath="datasets/{dataset}/kind", within=config),
        one_prompt=targets.one_prompt_of(settings),
        test_share=lookup(dpath="datasets/{dataset}/test_share", within=config),
        val_share=lookup(dpath="datasets/{dataset}/val_share", within=config),
        seed=lookup(dpath="datasets/{dataset}/seed", within=config),
        max_reject_share=lookup(dpath="datasets/{dataset}/max_reject_share", within=config),
        row_limits=lookup(dpath="datasets/{dataset}/row_limits", within=config),
        drop_near_duplicates=lookup(dpath="datasets/{dataset}/near_duplicates/drop", within=config),
        picture_distance=targets.distance_to_drop_by(settings),
        read_columns=targets.read_columns_of(settings),
    threads: 4
    resources:
        mem_mb=4_000,
        disk_mb=16_000,
        runtime=60,
    message:
        "Validating {wildcards.dataset}"
    script:
        "../scripts/validate_sharegpt.py"
