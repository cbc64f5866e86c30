# The gate: a short training with the full run's own settings, on the longest rows and a sample.
#
# Needs: rows that fit max_length, with their lengths; their pictures in the store, if any; the base
#        model; an estimate that did not refuse the run.
# Makes: checkpoints/{run}/smoke/: gate.json and gate.html (checks, peak memory, tokens per second, expected
#        length of the full run), report.json, loss.png. It trains in stores.runs/{run}/smoke/DIGEST.
# Holds: the longest rows were trained on; the loss is finite and falls; the checkpoint can be read, and the merge would
#        accept it; the configured number of processes train together. A closed gate fails the rule, with the reason.


rule train_smoke:
    """Train a few steps on the longest rows, and open or close the gate to the full run."""
    input:
        rows="fitted/{run}",
        # A run whose requirements no row can show is not trained; other rows are no reason to train it again.
        judging=ancient("chosen/{run}/val"),
        pictures=inputs.train_pictures,
        model=inputs.model,
        estimate=ancient("estimates/{run}.json"),  # it lets the run start; another one is no reason to train again
    output:
        smoke=report(
            directory("checkpoints/{run}/smoke"),
            patterns=["{page}.html", "{figure}.png"],  # a pattern without a wildcard finds nothing
            caption="../docs/report/smoke.rst",
            category="Training",
            subcategory="{run}: smoke run",
        ),
    log:
        "logs/train_smoke/{run}.log",
    benchmark:
        "benchmarks/train_smoke/{run}.tsv"
    params:
        settings=params.run(*params.trained),
        smoke_settings=params.run("smoke"),
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
        disk_mb=20_000,
        runtime=120,
        pod_template=resources.template(resources.train_gpus),
    message:
        "Smoke run of {wildcards.run}: the longest rows first"
    script:
        "../scripts/stages/train_smoke.py"
