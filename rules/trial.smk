# A trial of a search: a training of its run with the settings that one step asks of one slot, up to the step's end.
#
# Needs: what the step asks; the run's open gate, rows that fit, their pictures in the store, the base model; if the
#        evaluation judges, the val split.
# Makes: search/{search}/{round}/{rung}/{slot}.json: how it ended (done, failed, stopped, empty), its value, losses,
#        peak memory and hours. It trains in stores.runs/RUN/search/DIGEST, where a later rung goes on.
# Holds: a training that fails with its settings, spends its hours, or gets nowhere twice in a row, is a result with the
#        reason; a signal is none: the same command resumes. The schedule is that of the whole run in every rung.


rule trial:
    """Train with the settings that a search asks, up to the end of its step."""
    input:
        asked="search/{search}/{round}/{rung}/asked.json",
        rows=inputs.of_search("fitted/{run}"),
        pictures=inputs.of_search(inputs.train_pictures),
        model=inputs.of_search(inputs.model),
        # It says that rows and machine are good; the run's own settings, with which it trained, are not the trial's.
        smoke=ancient(inputs.of_search("checkpoints/{run}/smoke")),
        stats=inputs.judged(inputs.data("stats.json")),
        val=inputs.judged(inputs.data("val.jsonl")),
        judged_pictures=inputs.judged(inputs.run_pictures),
        raw_train=inputs.judged(inputs.raw_gold("train")),
        fixed_rows=inputs.judged(inputs.fixed_rows_gold),
    output:
        result="search/{search}/{round}/{rung}/{slot}.json",
    log:
        "logs/trial/{search}.{round}.{rung}.{slot}.log",
    benchmark:
        "benchmarks/trial/{search}.{round}.{rung}.{slot}.tsv"
    params:
        settings=params.search_run(*params.trained),
        objective=params.judging,
        picture_store=lookup(dpath="stores/pictures", within=config),
        run_store=lookup(dpath="stores/runs", within=config),
        evaluation_store=lookup(dpath="stores/evaluations", within=config),
    threads: inputs.of_search(resources.train_threads)
    resources:
        nodes=inputs.of_search(resources.train_nodes),
        gpu=inputs.of_search(resources.train_gpus),
        gpu_manufacturer="nvidia",
        scale=0,
        warning_seconds=180,  # on Slurm: so long before its end it is told to save
        mem_mb=inputs.of_search(lookup(dpath="runs/{run}/resources/train_mem_mb", within=config)),
        disk_mb=inputs.of_search(resources.train_disk),
        runtime=inputs.of_search(lookup(dpath="runs/{run}/resources/train_runtime", within=config)),
        pod_template=inputs.of_search(resources.template(resources.train_gpus)),
    message:
        "Trial of {wildcards.search}: round {wildcards.round}, rung {wildcards.rung}, slot {wildcards.slot}"
    script:
        "../scripts/stages/trial.py"
