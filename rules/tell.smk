# The study of a search after one more step: what the next step learns from.
#
# Needs: what the step asked, the results of all its trials, the account of the step before (the first has none).
# Makes: search/{search}/{round}/{rung}/study.journal (an Optuna journal) and study.json: all results so far, with the
#        importance of each setting; no Optuna is needed to read it.
# Holds: each result is of what was asked. Failed trials are told as such; those above a limit as infeasible; those that
#        did not go on with the values of the rungs that they reached.


rule tell:
    """Add the results of one step of a search to its study."""
    input:
        asked="search/{search}/{round}/{rung}/asked.json",
        asked_journal="search/{search}/{round}/{rung}/asked.journal",
        results=inputs.step_results,
        before=inputs.step_before("study.json"),
    output:
        study="search/{search}/{round}/{rung}/study.json",
        journal="search/{search}/{round}/{rung}/study.journal",
    log:
        "logs/tell/{search}.{round}.{rung}.log",
    benchmark:
        "benchmarks/tell/{search}.{round}.{rung}.tsv"
    params:
        modules=["vlmflow.search.study_program"],  # which runs in the environment `search`
        settings=params.search("objective", "rungs", "limits"),
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=1_000,
        runtime=30,
        pod_template="search",
    message:
        "Telling {wildcards.search} the results of round {wildcards.round}, rung {wildcards.rung}"
    script:
        "../scripts/stages/tell.py"
