# Whether the tuned model is better than its base: losses of both on rows that the run was not trained on.
#
# Needs: the proven weights, the training's report and rows, the base model, a split of the data set with its pictures,
#        and the rows of it that choose_rows chose.
# Makes: eval/{run}/{split}/: report.json (verdict, figures with intervals, per source and in all), rows.jsonl (both
#        models' losses of every row), left_out.jsonl (every other row of the split, with the reason). Measured losses
#        are kept in stores.evaluations: a killed evaluation resumes, and the base is measured once for all runs.
# Holds: both models got the same tokens; the scored answer is the same in all passes of a row. Where val has 200
#        pictures (questions, where there are none), its rows are of the half that the training was not given; otherwise
#        report.json says by what they also chose. Every making of eval/{run}/test is a line of
#        stores.evaluations/looks.jsonl.


rule evaluate:
    """Compare a run's proven weights with their base on val or test."""
    input:
        verified="verified/{run}",
        full="checkpoints/{run}/full",
        fitted="fitted/{run}",
        model=inputs.model,
        chosen="chosen/{run}/{split}",
        rows=inputs.split_rows,
        stats=inputs.data("stats.json"),
        pictures=inputs.run_pictures,
    output:
        evaluated=directory("eval/{run}/{split}"),
    log:
        "logs/evaluate/{run}.{split}.log",
    benchmark:
        "benchmarks/evaluate/{run}.{split}.tsv"
    wildcard_constraints:
        split="val|test",
    params:
        settings=params.run(*params.evaluated, "evaluation.neutral_feedback", "model.model_type"),
        chosen_by=params.chosen_by_of_val,
        processes=params.processes,
        picture_store=lookup(dpath="stores/pictures", within=config),
        evaluation_store=lookup(dpath="stores/evaluations", within=config),
    threads: 8
    resources:
        gpu=resources.node_gpus,
        gpu_manufacturer="nvidia",
        scale=0,
        mem_mb=lookup(dpath="runs/{run}/resources/train_mem_mb", within=config),
        disk_mb=resources.weights_disk,
        runtime=720,
        pod_template=resources.template(resources.node_gpus),
    message:
        "Evaluating {wildcards.run} on {wildcards.split}"
    script:
        "../scripts/stages/evaluate.py"
