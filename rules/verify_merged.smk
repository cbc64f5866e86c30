# Proves that the merged weights answer as the model that was trained, and keeps them with all that was verified.
#
# Needs: the merged folder and what verify_tensors found in it, the base model, the finished training, and rows of the
#        val split for the logits.
# Makes: verified/{run}/, from the merged folder's own files, after every check has passed; with proof.json: the results
#        of the checks, and the digest of every file.
# Holds: the files are those whose tensors were verified; logits agree with base + adapter in peft, or with those that
#        the trainer stored; the folder loads offline. verified/{run} exists only if all of this holds.


rule verify_merged:
    """Verify the merged weights, and keep them with the proof."""
    input:
        merged="work/{run}/merged",
        tensors="work/{run}/tensors.json",
        full="checkpoints/{run}/full",
        model=inputs.model,
        rows="fitted/{run}",
        pictures=inputs.train_pictures,
    output:
        verified=directory("verified/{run}"),
    log:
        "logs/verify_merged/{run}.log",
    benchmark:
        "benchmarks/verify_merged/{run}.tsv"
    params:
        settings=params.run(*params.lengths, "verify", "device", "train.dtype"),
        picture_store=lookup(dpath="stores/pictures", within=config),
    threads: 8
    resources:
        gpu=resources.verify_gpus,
        gpu_manufacturer="nvidia",
        scale=0,
        mem_mb=lookup(dpath="runs/{run}/resources/train_mem_mb", within=config),
        disk_mb=resources.weights_disk,
        runtime=120,
        pod_template=resources.template(resources.verify_gpus),
    message:
        "Verifying the merged weights of {wildcards.run}"
    script:
        "../scripts/stages/verify_merged.py"
