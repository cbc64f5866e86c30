# Verifies that each tensor of the merged weights is base + adapter, or the base's, or the one that was trained.
#
# Needs: the merged folder, the base model, the finished training. No GPU, so that none waits for the disk.
# Makes: work/{run}/tensors.json, the results and the digest of every merged file; temporary, for verify_merged.
# Holds: key set, shapes and dtypes equal the base's; untouched tensors equal the base's byte for byte; touched ones are
#        W + s·BA, or the trainer's, within rounding.


rule verify_tensors:
    """Verify every tensor of the merged weights."""
    input:
        merged="work/{run}/merged",
        full="checkpoints/{run}/full",
        model=inputs.model,
    output:
        tensors=temp("work/{run}/tensors.json"),
    log:
        "logs/verify_tensors/{run}.log",
    benchmark:
        "benchmarks/verify_tensors/{run}.tsv"
    threads: 4
    resources:
        mem_mb=8_000,
        disk_mb=resources.weights_disk,
        runtime=120,
        pod_template="train",
    message:
        "Verifying the merged tensors of {wildcards.run}"
    script:
        "../scripts/stages/verify_tensors.py"
