# Whether the best trial of a search beats the run's own settings.
#
# Needs: the study after the last step; what trial 0, with the run's own settings, and the best trial left in
#        stores.runs; val with its pictures, the base model.
# Makes: search/{search}/judged.json: the trials whose settings best.yaml and probably.yaml have, the difference
#        between the best trial and trial 0 with its interval, and the sentence for people.
# Holds: where val has 200 pictures (questions, where there are none), both are compared on a half of it that chose
#        neither them nor their checkpoints. Unless the whole interval says better, the run's own settings are kept.
#        Merged weights are made for the comparison alone; a search whose best trial is trial 0 measures nothing.


rule judge_best:
    """Compare the best trial of a search with the run's own settings."""
    input:
        study=inputs.last_study,
        rows=inputs.of_search("fitted/{run}"),
        pictures=inputs.of_search(inputs.train_pictures),
        model=inputs.of_search(inputs.model),
        stats=inputs.of_search(inputs.data("stats.json")),
        val=inputs.of_search(inputs.data("val.jsonl")),
        judged_pictures=inputs.of_search(inputs.run_pictures),
        raw_train=inputs.of_search(inputs.raw_gold("train")),
        fixed_rows=inputs.of_search(inputs.fixed_rows_gold),
    output:
        judged="search/{search}/judged.json",
    log:
        "logs/judge_best/{search}.log",
    benchmark:
        "benchmarks/judge_best/{search}.tsv"
    params:
        modules=inputs.of_search(params.form_modules),  # it says which rows have feedback
        settings=params.search_run(*params.trained),
        evaluation=params.search_run("evaluation.rows", "evaluation.feedback"),
        limits=params.search("limits"),
        picture_store=lookup(dpath="stores/pictures", within=config),
        run_store=lookup(dpath="stores/runs", within=config),
        evaluation_store=lookup(dpath="stores/evaluations", within=config),
    threads: inputs.of_search(resources.train_threads)
    resources:
        gpu=inputs.of_search(resources.node_gpus),
        gpu_manufacturer="nvidia",
        scale=0,
        mem_mb=inputs.of_search(lookup(dpath="runs/{run}/resources/train_mem_mb", within=config)),
        disk_mb=inputs.of_search(resources.weights_disk),
        runtime=720,
        pod_template=inputs.of_search(resources.template(resources.node_gpus)),
    message:
        "Judging the best trial of {wildcards.search}"
    script:
        "../scripts/stages/judge_best.py"
