# Merges the trained adapter into the base model's weights.
#
# Needs: the base model's manifest, which says where its files are, and the finished adapter.
# Makes: work/{run}/merged/, a model folder in the base's own layout; temporary, until verify_merged has
#        checked it and moved it.
# Holds: every tensor of the adapter is used exactly once, or the merge refuses it by name; weights and files that the
#        adapter does not touch equal the base's byte for byte; the same bytes on any number of cores. Memory: blocks
#        of rows and the factors of one layer, not a model or a shard, so mem_mb does not grow with the model.


rule merge_lora:
    """Merge a run's adapter into its base model, shard by shard."""
    input:
        model=inputs.model,
        full="checkpoints/{run}/full",
    output:
        merged=temp(directory("work/{run}/merged")),
    log:
        "logs/merge_lora/{run}.log",
    benchmark:
        "benchmarks/merge_lora/{run}.tsv"
    threads: 4
    resources:
        mem_mb=4_000,
        disk_mb=resources.weights_disk,
        runtime=120,
        pod_template="train",
    message:
        "Merging the adapter of {wildcards.run} into its base model"
    script:
        "../scripts/merge_lora.py"
