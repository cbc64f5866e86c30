# The best settings that a search found, as overlays for the configuration.
#
# Needs: the study after the last step, the results of all trials, and what became of the best one against trial 0.
# Makes: search/{search}/best.yaml: the run's keys of `train` with the values of the best trial, or with its own where
#        no trial is shown to beat them; comments say which, with trial and value.
#        `snakemake --configfile … search/NAME/best.yaml` trains the run with them.
#        search/{search}/probably.yaml: the same, where a better mean suffices.
# Holds: the trial trained to its end, within the limits. A result that was changed after the study learned from it is
#        refused; one that was removed is made again (scripts/vlmflow/harness/inputs.py).


rule choose_best:
    """Write the best settings that a search found."""
    input:
        study=inputs.last_study,
        judged="search/{search}/judged.json",
        results=inputs.search_results,
    output:
        best="search/{search}/best.yaml",
        probably="search/{search}/probably.yaml",
    log:
        "logs/choose_best/{search}.log",
    benchmark:
        "benchmarks/choose_best/{search}.tsv"
    params:
        settings=params.search("run", "limits", "seed"),
    threads: 1
    resources:
        mem_mb=1_000,
        disk_mb=1_000,
        runtime=30,
    message:
        "Choosing the best settings of {wildcards.search}"
    script:
        "../scripts/stages/choose_best.py"
