# Raw rows to ShareGPT rows: FIRE, Volcano, Alpaca, and your own (JSON, JSON lines, CSV or parquet); each raw form is a
# module of scripts/vlmflow/rows/forms/.
#
# Needs: the raw rows of a split; an edited quarantine, if its rows should replace raw ones.
# Makes: converted/{dataset}/{split}.jsonl, the training rows of each usable raw row, in their order, with the number of
#        the raw row; converted/{dataset}/{split}.rejects.jsonl, the raw rows that are unusable or not requested
#        (another modality, source or label, not drawn); converted/{dataset}/{split}.unread.json, the unread keys, each
#        with its number of rows.
# Holds: every raw row is in exactly one of the two files; the same bytes on any number of cores; no key that changes a
#        row's meaning stays unread, unless ignore_keys names it.


rule convert_rows:
    """Turn raw conversations into ShareGPT rows."""
    input:
        raw=inputs.raw,
        raw_accounts=inputs.raw_accounts,
        fixed_rows=inputs.fixed_rows,
    output:
        converted="converted/{dataset}/{split}.jsonl",
        rejects="converted/{dataset}/{split}.rejects.jsonl",
        unread="converted/{dataset}/{split}.unread.json",
    log:
        "logs/convert_rows/{dataset}.{split}.log",
    benchmark:
        "benchmarks/convert_rows/{dataset}.{split}.tsv"
    params:
        modules=params.form_modules,
        split="{split}",
        settings=params.conversion,
        choice=params.row_choice,
    threads: 4
    resources:
        mem_mb=2_000,
        disk_mb=8_000,
        runtime=60,
    message:
        "Converting the {wildcards.split} split of {wildcards.dataset}"
    script:
        "../scripts/stages/convert_rows.py"
