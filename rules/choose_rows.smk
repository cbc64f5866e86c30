# The rows of val or test on which a run is compared with its base, and their controls: chosen before its training.
#
# Needs: the run's rows; a split of the data set with its pictures; raw rows, where they have gold answers beside their
#        turns (FIRE): no row gets the feedback of one with the same gold answer; the rows of the runs from whose
#        weights it is trained.
# Makes: chosen/{run}/{split}/: rows.jsonl (each row with the rows that give its controls, echo and gold answer),
#        left_out.jsonl (every other row of the split, with the reason), account.json (on how many rows a verdict can
#        rest).
# Holds: no row has a picture (a question, where there is none) that a base of the run was trained on. With
#        `evaluate.require`, too few rows for what it requires are refused, before anything is trained.


rule choose_rows:
    """Choose the rows of val or test on which a run is compared with its base."""
    input:
        fitted="fitted/{run}",
        rows=inputs.split_rows,
        stats=inputs.data("stats.json"),
        pictures=inputs.run_pictures,
        raw_train=inputs.raw_gold("train"),
        raw_val=inputs.raw_gold("val"),
        raw_test=inputs.raw_gold("test"),
        fixed_rows=inputs.fixed_rows_gold,
        bases=inputs.bases,
        base_pictures=inputs.base_pictures,
    output:
        chosen=directory("chosen/{run}/{split}"),
    log:
        "logs/choose_rows/{run}.{split}.log",
    benchmark:
        "benchmarks/choose_rows/{run}.{split}.tsv"
    wildcard_constraints:
        split="val|test",
    params:
        modules=params.form_modules,  # it says which rows have feedback, and reads right answers
        settings=params.run("evaluation.feedback", "train.seed"),
        require=params.required,
        picture_store=lookup(dpath="stores/pictures", within=config),
    threads: 1
    resources:
        mem_mb=4_000,
        disk_mb=1_000,
        runtime=60,
        pod_template="train",
    message:
        "Choosing the rows of {wildcards.split} on which {wildcards.run} is judged"
    script:
        "../scripts/stages/choose_rows.py"
