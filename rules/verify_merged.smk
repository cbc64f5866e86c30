# The last check before merged weights take their name.
#
# Needs: the merged folder, the base model, the adapter, rows of the val split for the logits, the rows that were
#        trained on and what the configuration and picture_sources.yaml state of their licences.
# Makes: merged/{run}/, of the merged folder's own files, after every check has passed; with provenance.json
#        (digests from the raw file to the weights) and a model card, which lists sources and licences.
# Holds: key set, shapes and dtypes are the base's; what the adapter does not touch is the base's byte for byte;
#        what it touches is W + s·BA within rounding; logits agree with base + adapter in peft; it loads offline.
#        merged/{run} does not exist unless all of that was seen.


rule verify_merged:
    """Prove the merged weights, write where they come from, and give them their name."""
    input:
        merged="work/{run}/merged",
        full="checkpoints/{run}/full",
        smoke="checkpoints/{run}/smoke",
        model=run_targets.model_of(settings),
        rows="fitted/{run}",
        stats=run_targets.data_of(settings, "stats.json"),
    output:
        verified=directory("merged/{run}"),
    log:
        "logs/verify_merged/{run}.log",
    benchmark:
        "benchmarks/verify_merged/{run}.tsv"
    params:
        code=code("verify_merged"),
        verify=lookup(dpath="runs/{run}/verify", within=config),
        device=lookup(dpath="runs/{run}/device", within=config),
        dtype=lookup(dpath="runs/{run}/train/dtype", within=config),
        image_max_tokens=lookup(dpath="runs/{run}/train/image_max_tokens", within=config),
        picture_store=lookup(dpath="stores/pictures", within=config),
        data_sources=run_targets.data_sources_of(settings),
        licence=run_targets.data_setting_of(settings, "licence"),
        source_licences=run_targets.data_setting_of(settings, "source_licences"),
        picture_licences=run_targets.picture_licences_of(settings),
    threads: 8
    resources:
        gpu=run_targets.verify_gpus_of(settings),
        gpu_manufacturer="nvidia",
        scale=0,
        mem_mb=lookup(dpath="runs/{run}/resources/train_mem_mb", within=config),
        disk_mb=lookup(dpath="runs/{run}/resources/weights_mb", within=config),
        runtime=120,
        pod_template=run_targets.pod_template_of(settings, run_targets.verify_gpus_of),
    message:
        "Verifying the merged weights of {wildcards.run}"
    script:
        "../scripts/verify_merged.py"
