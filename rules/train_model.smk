# The full training, with the run's tuner and strategy: its processes are started with torchrun, on all its nodes.
#
# Needs: an open gate, rows that fit max_length, their pictures in the store, the base model.
# Makes: checkpoints/{run}/full/: what the best checkpoint by validation loss has (the adapter; with tuner full the
#        model's weights), report.json, the events (progress.jsonl), loss.png.
#        It trains in stores.runs/{run}/full/DIGEST, a folder bound to the digest of data and settings, which
#        keeps the newest and the best checkpoint; finished trainings with other settings are beside it.
# Holds: the target step was reached and evaluated, or validation loss ended the run early (early_stop_after); after a
#        signal, a kill or a full disk, the same command resumes from the newest whole checkpoint; no two trainers write
#        to one run folder.


rule train_model:
    """Train to the last step, and keep the best checkpoint by validation loss."""
    input:
        rows="fitted/{run}",
        pictures=inputs.train_pictures,
        model=inputs.model,
        smoke="checkpoints/{run}/smoke",
    output:
        full=report(
            directory("checkpoints/{run}/full"),
            patterns=["{figure}.png"],  # a pattern without a wildcard finds nothing
            caption="../docs/report/full.rst",
            category="Training",
            subcategory="{run}: full run",
        ),
    log:
        "logs/train_model/{run}.log",
    benchmark:
        "benchmarks/train_model/{run}.tsv"
    params:
        settings=params.run(*params.trained),
        picture_store=lookup(dpath="stores/pictures", within=config),
        run_store=lookup(dpath="stores/runs", within=config),
    threads: resources.train_threads
    resources:
        nodes=resources.train_nodes,
        gpu=resources.train_gpus,
        gpu_manufacturer="nvidia",
        scale=0,
        warning_seconds=180,  # on Slurm: so long before its end it is told to save
        mem_mb=lookup(dpath="runs/{run}/resources/train_mem_mb", within=config),
        disk_mb=resources.train_disk,
        runtime=lookup(dpath="runs/{run}/resources/train_runtime", within=config),
        pod_template=resources.template(resources.train_gpus),
    message:
        "Training {wildcards.run}"
    script:
        "../scripts/stages/train_model.py"
