# Turns converted rows into a run's data. This is the data gate: later stages only see data that passed.
#
# Needs: for every raw split the raw files, the converted rows, the converter's rejects and its account of unread keys,
#        and the image manifest if its rows have pictures; an edited quarantine, if any; with near_duplicates.drop the
#        picture hashes.
# Makes: data/{dataset}/{train,val,test}.jsonl; stats.json and counts.html, where every raw row went;
#        quarantine.jsonl, the rejected rows with split, row number and reason.
# Holds: rows in = rows kept + rejects by reason, exactly; every row fits docs/sharegpt-row.schema.json and the
#        rules beyond it; no picture, and no prompt of a row without one, is in two splits; no duplicates; too many
#        rejects, or no rows, is an error.


rule validate_sharegpt:
    """Check every row, hold out val and test, if they have no file, by picture or prompt, account for every raw row."""
    input:
        raw_train=inputs.raw_of("train"),
        raw_val=inputs.raw_of("val"),
        raw_test=inputs.raw_of("test"),
        raw_accounts=inputs.raw_accounts,
        converted=inputs.per_split("converted/{dataset}/{split}.jsonl"),
        rejects=inputs.per_split("converted/{dataset}/{split}.rejects.jsonl"),
        unread=inputs.per_split("converted/{dataset}/{split}.unread.json"),
        pictures=inputs.manifests,
        fixed_rows=inputs.fixed_rows,
        hashes=branch(lookup(dpath="datasets/{dataset}/near_duplicates/drop", within=config), then=inputs.hashes),
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
        settings=params.dataset(
            *("kind", "one_prompt", "form", "max_history_rounds", "min_score", "single_turn", "train_on"),
            *("thoughts", "feedback_form", "modality", "skip_images"),
            *("test_share", "val_share", "seed", "max_reject_share", "row_limits", "read_columns"),
            near_duplicates="near_duplicates_to_drop",
        ),
    threads: 4
    resources:
        mem_mb=4_000,
        disk_mb=16_000,
        runtime=60,
    message:
        "Validating {wildcards.dataset}"
    script:
        "../scripts/stages/validate_sharegpt.py"
