# The rows that a run trains on: those that fit its max_length.
#
# Needs: validated rows and their lengths; the base model's tokenizer and picture rule, by which they were measured.
# Makes: fitted/{run}/: {train,val}.jsonl, the rows; {train,val}.lengths.jsonl, their lengths; over_long.jsonl, every
#        row that did not fit, with its length and what became of it; account.json, counts and digests.
# Holds: no row has more than train.max_length tokens; rows in = rows as they were + shortened + left out; no row is
#        cut: a shortened one is what the converter makes of a shorter history. Where over-long rows are refused (the
#        default) and there are any, the rule fails and names them.


rule fit_rows:
    """Hand on the rows that fit max_length; refuse, leave out or shorten the others."""
    input:
        train_rows=run_targets.data_of(settings, "train.jsonl"),
        val_rows=run_targets.data_of(settings, "val.jsonl"),
        stats=run_targets.data_of(settings, "stats.json"),
        pictures=run_targets.train_pictures_of(settings),
        model=run_targets.model_of(settings),
        train_lengths="lengths/{run}/train.jsonl",
        val_lengths="lengths/{run}/val.jsonl",
        summary="lengths/{run}/summary.json",
    output:
        fitted=directory("fitted/{run}"),
    log:
        "logs/fit_rows/{run}.log",
    benchmark:
        "benchmarks/fit_rows/{run}.tsv"
    params:
        code=code("fit_rows"),
        max_length=lookup(dpath="runs/{run}/train/max_length", within=config),
        over_long=lookup(dpath="runs/{run}/over_long", within=config),
        image_max_tokens=lookup(dpath="runs/{run}/train/image_max_tokens", within=config),
        model_type=run_targets.model_type_of(settings),
        text_args=run_targets.text_args_of(settings),
        picture_store=lookup(dpath="stores/pictures", within=config),
    threads: 1
    resources:
        mem_mb=4_000,
        disk_mb=8_000,
        runtime=60,
        pod_template="train",
    message:
        "Fitting the rows of {wildcards.run} to its max_length"
    script:
        "../scripts/fit_rows.py"
