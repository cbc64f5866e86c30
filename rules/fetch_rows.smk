# Raw data files of every kind but FIRE: like fetch_fire, under its own name.
#
# Needs: the sources in the configuration (datasets: train, test), and for those on the hub their rows in pins.yaml.
# Makes: raw/{dataset}/{file}, the file itself; raw/{dataset}/.fetched/{file}.json, its size and sha256.
# Holds: revision, size and sha256 are the pinned ones, or the file does not exist.


use rule fetch_fire as fetch_rows with:
    log:
        "logs/fetch_rows/{dataset}.{file}.log",
    benchmark:
        "benchmarks/fetch_rows/{dataset}.{file}.tsv"
    wildcard_constraints:
        dataset=names.other_datasets(),
        file="[^/]+",
