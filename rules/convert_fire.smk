# Raw FIRE rows to ShareGPT rows.
#
# Needs: the raw JSON arrays of a split; an edited quarantine, if its rows should replace raw ones.
# Makes: converted/{dataset}/{split}.jsonl, training rows in the order of the raw rows, each with the number
#        of its raw row; converted/{dataset}/{split}.rejects.jsonl, the raw rows that are not trajectories, or not
#        requested; converted/{dataset}/{split}.unread.json, the unread keys, each with its number of rows.
# Holds: every raw row is in exactly one of the two files; the same bytes on any number of cores.


rule convert_fire:
    """Turn raw FIRE rows into ShareGPT rows, in the data set's form."""
    input:
        raw=inputs.raw,
        raw_accounts=inputs.raw_accounts,
        mended=inputs.mended,
    output:
        converted="converted/{dataset}/{split}.jsonl",
        rejects="converted/{dataset}/{split}.rejects.jsonl",
        unread="converted/{dataset}/{split}.unread.json",
    log:
        "logs/convert_fire/{dataset}.{split}.log",
    benchmark:
        "benchmarks/convert_fire/{dataset}.{split}.tsv"
    wildcard_constraints:
        dataset=names.fire_datasets(),
    params:
        split="{split}",
        settings=params.dataset(
            *("form", "max_history_rounds", "min_score", "single_turn", "thoughts", "feedback_form"),
            *("row_limits", "system_prompt", "ignore_keys"),
        ),
        choice=params.row_choice,
    threads: 4
    resources:
        mem_mb=2_000,
        disk_mb=8_000,
        runtime=60,
    message:
        "Converting the {wildcards.split} split of {wildcards.dataset}"
    script:
        "../scripts/convert_fire.py"
