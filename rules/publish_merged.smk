# Proven weights under their own name, with the model card and where they come from.
#
# Needs: the proven folder, what the training and the data left, and what the configuration and
#        picture_sources.yaml state of the data's licences.
# Makes: merged/{run}/, of the proven folder's own files by hard links, with provenance.json (digests from the raw
#        file to the weights) and README.md, a model card that lists sources and licences. It takes seconds: another
#        licence or another text of the card neither merges nor proves anything again.
# Holds: merged/{run} has the files that verified/{run} has, and no others but these two.


rule publish_merged:
    """Give a run's proven weights their name, with model card and provenance."""
    input:
        verified="verified/{run}",
        full="checkpoints/{run}/full",
        smoke="checkpoints/{run}/smoke",
        model=inputs.model,
        rows="fitted/{run}",
        stats=inputs.data("stats.json"),
    output:
        published=directory("merged/{run}"),
    log:
        "logs/publish_merged/{run}.log",
    benchmark:
        "benchmarks/publish_merged/{run}.tsv"
    params:
        data_sources=params.data_sources,
        licence=params.licence,
        source_licences=params.source_licences,
        picture_licences=params.picture_licences,
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=resources.weights_disk,
        runtime=60,
    message:
        "Publishing the proven weights of {wildcards.run}"
    script:
        "../scripts/publish_merged.py"
