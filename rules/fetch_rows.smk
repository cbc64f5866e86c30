# Raw data files, as their owners made them.
#
# Needs: the sources in the configuration (datasets: train, val, test), and for those on the hub their rows in
#        pins.yaml. A gated source needs a token: HF_TOKEN or `.venv/bin/hf auth login`.
# Makes: raw/{dataset}/{file}, the file itself: a hard link into stores.raw, or a copy of a local file;
#        raw/{dataset}/.fetched/{file}.json, its size and sha256, which every rule that reads it compares.
# Holds: revision, size and sha256 are the pinned ones, or the file does not exist. An interrupted fetch resumes where
#        it stopped.


rule fetch_rows:
    """Fetch a raw data file, pinned and checked."""
    input:
        inputs.local_raw,
    output:
        raw="raw/{dataset}/{file}",
        account="raw/{dataset}/.fetched/{file}.json",
    log:
        "logs/fetch_rows/{dataset}.{file}.log",
    benchmark:
        "benchmarks/fetch_rows/{dataset}.{file}.tsv"
    wildcard_constraints:
        file="[^/]+",
    params:
        source=params.raw_source,
        revision=params.raw_revision,
        state=params.raw_state,
        store=lookup(dpath="stores/raw", within=config),
    threads: 1
    resources:
        mem_mb=1_000,
        disk_mb=4_000,
        runtime=480,
        pod_template="fetch",
    message:
        "Fetching {wildcards.file}"
    script:
        "../scripts/stages/fetch_rows.py"
