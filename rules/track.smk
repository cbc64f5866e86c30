# A finished run in trackers: MLflow, an offline run of Weights & Biases, traces of its evaluated rows (OpenTelemetry).
#
# Needs: the finished training, the published weights with their provenance, and the run's evaluations and answers, if
#        it has a block `evaluate`; a block `track`, and the environment of envs/track.lock (vlmflow env track).
# Makes: tracked/{run}.json: what each tracker has. Offline runs are in stores.trackers.
# Holds: no other stage needs it, and no training knows a tracker: one that fails costs nothing but this file. Sending
#        again sends nothing twice; after a kill or a failure the same command sends what is missing.

is_evaluated = lookup(dpath="runs/{run}/evaluate", within=config)


rule track:
    """Send a finished run to its trackers."""
    input:
        full="checkpoints/{run}/full",
        merged="merged/{run}",
        evaluated=branch(is_evaluated, then=inputs.evaluated),
        answered=branch(is_evaluated, then=inputs.answered),
        rows=branch(is_evaluated, then=inputs.evaluated_rows),
        pictures=branch(is_evaluated, then=inputs.run_pictures),
    output:
        tracked="tracked/{run}.json",
    log:
        "logs/track/{run}.log",
    benchmark:
        "benchmarks/track/{run}.tsv"
    params:
        # They run in the environment `track`.
        modules=["vlmflow.track.to_mlflow", "vlmflow.track.to_wandb", "vlmflow.track.to_otlp"],
        track=params.run("track"),
        tracker_store=lookup(dpath="stores/trackers", within=config),
    threads: 1
    resources:
        mem_mb=4_000,
        disk_mb=resources.weights_disk,
        runtime=60,
        pod_template="track",
    message:
        "Sending {wildcards.run} to its trackers"
    script:
        "../scripts/stages/track.py"
