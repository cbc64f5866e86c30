# The rows that a run trains on: those that fit its max_length.
#
# Needs: validated rows and their lengths; the base model's tokenizer and picture rule, by which they were measured.
# Makes: fitted/{run}/: {train,val}.jsonl, the rows; {train,val}.lengths.jsonl, their lengths; over_long.jsonl, every
#        row that did not fit, with its length and what happened to it; account.json, counts and digests.
# Holds: no row has more than train.max_length tokens; rows in = rows as they were + shortened + left out; no row is
#        cut: a shortened one is what the converter makes from a shorter history. By default, over-long rows are
#        refused: the rule fails and names them.


rule fit_rows:
    """Keep the rows that fit max_length; refuse, drop or shorten the others."""
    input:
        train_rows=inputs.data("train.jsonl"),
        val_rows=inputs.data("val.jsonl"),
        stats=inputs.data("stats.json"),
        pictures=inputs.train_pictures,
        model_files=inputs.model_files,
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
        settings=params.run(*params.lengths, "train.max_length", "over_long"),
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
        "../scripts/stages/fit_rows.py"
