# The trials of one step of a search: new ones in the first rung of a round, then the best third of the last.
#
# Needs: study and journal of the step before (none for the first); the run's rows that fit, for the steps; its
#        estimate, or its smoke run, for the budget.
# Makes: search/{search}/{round}/{rung}/asked.json (settings, last step and hours of every slot's trial) and
#        asked.journal, the study with the new trials (an Optuna journal).
# Holds: trial 0 has the run's own settings, and goes on in every rung; the same seed and the same results give the same
#        trials; no settings are asked twice; a search that is estimated to need more than its budget
#        (search.NAME.limits.gpu_hours) is refused before its first trial, and one that has spent it asks nothing more.


rule propose:
    """Choose the trials of one step of a search."""
    input:
        rows=inputs.of_search("fitted/{run}"),
        # They only tell how long a training takes, and how many rows judge; other ones are no reason to ask again.
        estimate=ancient(inputs.of_search("estimates/{run}.json")),
        smoke=ancient(inputs.search_pace),
        chosen=ancient(inputs.of_search("chosen/{run}/val")),
        study=inputs.step_before("study.json"),
        journal=inputs.step_before("study.journal"),
    output:
        asked="search/{search}/{round}/{rung}/asked.json",
        asked_journal="search/{search}/{round}/{rung}/asked.journal",
    log:
        "logs/propose/{search}.{round}.{rung}.log",
    benchmark:
        "benchmarks/propose/{search}.{round}.{rung}.tsv"
    params:
        modules=["vlmflow.search.study_program"],  # which runs in the environment `search`
        settings=params.search("run", "space", "together", "rungs", "limits", "seed"),
        run=params.search_run("train", "nodes", "processes"),
        planned=params.planned,
        own=params.own_settings,
        require=lookup(dpath="search/{search}/objective", within=config),
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=1_000,
        runtime=30,
        pod_template="search",
    message:
        "Choosing trials of {wildcards.search}: round {wildcards.round}, rung {wildcards.rung}"
    script:
        "../scripts/stages/propose.py"
