# What base and tuned model answer, at first and after rounds of the row's own feedback, and how often they are right.
#
# Needs: the proven weights, the base model, a split of the data set with its pictures, and the rows of it that
#        choose_rows chose, with their gold answers.
# Makes: answers/{run}/{split}/: rows.jsonl (each turn with both models' answers and their scores), left_out.jsonl
#        (every other row of the split, with the reason), report.json (figures with intervals, per source and rule).
#        Answers are kept in stores.evaluations, one by one, so that a killed job repeats at most one, and the base is
#        asked once for all runs.
# Holds: both models got the same turns and pictures, one request at a time, without sampling, by servers of this rule
#        with the run's picture limits, or by one that is given. An answer that fails stops the rule and names its row.
#        Every making of answers/{run}/test is a line of stores.evaluations/looks.jsonl. No other stage needs it.


rule answer:
    """Ask a run's proven weights and their base the questions of val or test."""
    input:
        verified="verified/{run}",
        fitted="fitted/{run}",
        model=inputs.model,
        chosen="chosen/{run}/{split}",
        rows=inputs.split_rows,
        stats=inputs.data("stats.json"),
        pictures=inputs.run_pictures,
    output:
        answered=directory("answers/{run}/{split}"),
    log:
        "logs/answer/{run}.{split}.log",
    benchmark:
        "benchmarks/answer/{run}.{split}.tsv"
    wildcard_constraints:
        split="val|test",
    params:
        settings=params.run(*params.evaluated, "answer"),
        picture_store=lookup(dpath="stores/pictures", within=config),
        evaluation_store=lookup(dpath="stores/evaluations", within=config),
    threads: 8
    resources:
        gpu=resources.answer_gpus,
        gpu_manufacturer="nvidia",
        scale=0,
        mem_mb=lookup(dpath="runs/{run}/resources/train_mem_mb", within=config),
        disk_mb=resources.weights_disk,
        runtime=720,
        pod_template=resources.answer_template,
    message:
        "Asking {wildcards.run} and its base on {wildcards.split}"
    script:
        "../scripts/stages/answer.py"
