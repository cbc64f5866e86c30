# Proven weights under their own name, with the model card and their provenance.
#
# Needs: the proven folder, the reports of training and data, and the licences of the data from the configuration and
#        picture_sources.yaml; with an `evaluate:` block in the run, its evaluations.
# Makes: merged/{run}/, with hard links to the proven folder's files, provenance.json (digests from the raw file to the
#        weights) and README.md, a model card that lists sources and licences. It takes seconds: a new licence or card
#        text merges and proves nothing again.
# Holds: merged/{run} has the files of verified/{run}, and only these two besides. Where `evaluate.require` is set, it
#        exists only if the evaluation on val shows as much.


rule publish_merged:
    """Give a run's proven weights their name, with model card and provenance."""
    input:
        verified="verified/{run}",
        full="checkpoints/{run}/full",
        smoke="checkpoints/{run}/smoke",
        model=inputs.model,
        rows="fitted/{run}",
        stats=inputs.data("stats.json"),
        evaluations=branch(lookup(dpath="runs/{run}/evaluate", within=config), then=inputs.evaluated),
    output:
        published=directory("merged/{run}"),
    log:
        "logs/publish_merged/{run}.log",
    benchmark:
        "benchmarks/publish_merged/{run}.tsv"
    params:
        reads="vlmflow/reports/templates/card",
        settings=params.run(
            *("dataset.all_addresses", "dataset.licence", "dataset.source_licences", "evaluation.require", "chosen_by")
        ),
        picture_licences=params.picture_licences,
        good_run=params.good_run,
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=resources.weights_disk,
        runtime=60,
    message:
        "Publishing the proven weights of {wildcards.run}"
    script:
        "../scripts/stages/publish_merged.py"
