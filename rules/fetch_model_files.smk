# Base models without their weights.
#
# Needs: as fetch_model: the model's source in the configuration; for one on the hub its row in pins.yaml. Of merged/RUN
#        no weights, but the small files of that run's own model, which are the same.
# Makes: model_files/{model}/: files/, copies of the model's configuration, tokenizer and picture rule, some MB; and
#        manifest.json, size and sha256 of each, and the names of the tensors in the weights (from index or header).
#        With `dequantize` these are of the bfloat16 base that fetch_model makes.
# Holds: the files are those of the pinned revision, only data and all of it but the weights. Lengths and the estimate
#        come from them, so that both are known before the weights are fetched, or trained by another run.


rule fetch_model_files:
    """Fetch a base model's files other than its weights."""
    input:
        inputs.local_model_files,
        base=inputs.files_of_base_run,
    output:
        files=directory("model_files/{model}"),
    log:
        "logs/fetch_model_files/{model}.log",
    benchmark:
        "benchmarks/fetch_model_files/{model}.tsv"
    params:
        source=lookup(dpath="models/{model}/source", within=config),
        revision=params.model_revision,
        state=params.model_files_state,
        store=lookup(dpath="stores/models", within=config),
        chat_template=lookup(dpath="models/{model}/chat_template", within=config),
        date=lookup(dpath="models/{model}/date", within=config),
        stop_tokens=lookup(dpath="models/{model}/stop_tokens", within=config),
        dequantize=lookup(dpath="models/{model}/dequantize", within=config),
    threads: 4
    resources:
        mem_mb=1_000,
        disk_mb=1_000,
        runtime=60,
        pod_template="fetch",
    message:
        "Fetching the small files of the model {wildcards.model}"
    script:
        "../scripts/stages/fetch_model_files.py"
