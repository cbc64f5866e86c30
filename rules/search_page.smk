# A search for a run's settings, for people: one self-contained page.
#
# Needs: the study after the last step, the results of all trials, and what became of the best one against trial 0.
# Makes: reports/search-{search}.html: how the best settings differ from the run's own and which of them mattered; every
#        trial with its value, memory and hours; the curves of all rungs; limits and cost.
# Holds: the file loads nothing and runs nothing; the same results give the same page. No other stage needs it.


rule search_page:
    """Show the trials of a search."""
    input:
        study=inputs.last_study,
        judged="search/{search}/judged.json",
        results=inputs.search_results,
    output:
        page=report(
            "reports/search-{search}.html",
            caption="../docs/report/search.rst",
            category="Search",
            labels={"search": "{search}"},
        ),
    log:
        "logs/search_page/{search}.log",
    benchmark:
        "benchmarks/search_page/{search}.tsv"
    params:
        reads="vlmflow/reports/templates",
        run=params.search("run"),
        limits=params.search("limits"),
        device=params.search_run("device"),
    threads: 1
    resources:
        mem_mb=2_000,
        disk_mb=1_000,
        runtime=30,
    message:
        "Drawing the page of {wildcards.search}"
    script:
        "../scripts/stages/search_page.py"
