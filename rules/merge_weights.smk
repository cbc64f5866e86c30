# Brings what a run trained into the base model's weights: an adapter, or weights of the model itself.
#
# Needs: the base model's manifest, which says where its files are, and the finished training.
# Makes: work/{run}/merged/, a model folder in the base's own layout; temporary, until verify_merged has
#        checked it and moved it.
# Holds: every trained tensor is used exactly once, or the merge refuses it by name; weights and files that the training
#        does not touch equal the base's byte for byte; the same bytes on any number of cores. Memory: blocks of rows
#        and the factors of one layer, not a model or a shard, so mem_mb does not grow with the model.


rule merge_weights:
    """Merge what a run trained into its base model, shard by shard."""
    input:
        model=inputs.model,
        full="checkpoints/{run}/full",
    output:
        merged=temp(directory("work/{run}/merged")),
    log:
        "logs/merge_weights/{run}.log",
    benchmark:
        "benchmarks/merge_weights/{run}.tsv"
    threads: 4
    resources:
        mem_mb=4_000,
        disk_mb=resources.weights_disk,
        runtime=120,
        pod_template="train",
    message:
        "Merging what {wildcards.run} trained into its base model"
    script:
        "../scripts/stages/merge_weights.py"
