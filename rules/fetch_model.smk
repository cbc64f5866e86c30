# Base models.
#
# Needs: the model's source in the configuration; for one on the hub its row in pins.yaml, for merged/RUN that run's
#        weights. A gated model needs a token: HF_TOKEN or `.venv/bin/hf auth login`.
# Makes: models/{model}/manifest.json: a folder of links (below stores.models) to the model's files, which are in that
#        store, in the local folder or in merged/RUN, with size and sha256 of each; of merged/RUN also its provenance.
#        With `dequantize` the files are a bfloat16 copy in that store, and the manifest also has those in FP8.
# Holds: the files are those of the pinned revision with the hub's digests, only data and all of it; or the manifest
#        does not exist. Training, merge and verify see only the files that it names.


rule fetch_model:
    """Fetch a base model, or take a local folder, and describe every file of it."""
    input:
        inputs.local_model,
        merged=inputs.base_run,
    output:
        model=directory("models/{model}"),
    log:
        "logs/fetch_model/{model}.log",
    benchmark:
        "benchmarks/fetch_model/{model}.tsv"
    params:
        source=lookup(dpath="models/{model}/source", within=config),
        revision=params.model_revision,
        state=params.model_state,
        store=lookup(dpath="stores/models", within=config),
        chat_template=lookup(dpath="models/{model}/chat_template", within=config),
        date=lookup(dpath="models/{model}/date", within=config),
        stop_tokens=lookup(dpath="models/{model}/stop_tokens", within=config),
        dequantize=lookup(dpath="models/{model}/dequantize", within=config),
    threads: 4
    resources:
        mem_mb=2_000,
        disk_mb=resources.fetched_disk,
        runtime=1_440,
        pod_template="fetch",
    message:
        "Fetching the model {wildcards.model}"
    script:
        "../scripts/stages/fetch_model.py"
