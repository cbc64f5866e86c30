# Pictures from their sources, for data sets with fetch_images: true.
#
# Needs: the raw rows of a split, and fixed ones if any; picture_sources.yaml, which gives each picture's source, and
#        for archives on the hub their rows in pins.yaml.
# Makes: images/{dataset}/{split}.fetched.json, the account: per source how many pictures were wanted, present, fetched
#        and missing, the reasons, the number of rows affected, and the bytes. The pictures go to
#        stores.fetched_pictures, which is not a declared output; resolve_images uses it as one more root.
# Holds: a picture that has its name there is whole, with the size and CRC of its archive's directory; a picture in a
#        root is not fetched; an interrupted fetch resumes where it stopped. A missing picture fails nothing here: its
#        rows are rejected later, within max_reject_share.


rule fetch_images:
    """Fetch the pictures that no root holds, the cheapest way that their sources allow."""
    input:
        raw=inputs.raw,
        raw_accounts=inputs.raw_accounts,
        fixed_rows=inputs.fixed_rows,
    output:
        account="images/{dataset}/{split}.fetched.json",
    log:
        "logs/fetch_images/{dataset}.{split}.log",
    benchmark:
        "benchmarks/fetch_images/{dataset}.{split}.tsv"
    params:
        dataset="{dataset}",
        image_roots=params.dataset("image_roots"),
        max_bytes=params.dataset("picture_limits.max_bytes"),
        store=lookup(dpath="stores/fetched_pictures", within=config),
        sources=params.picture_sources,
        revision=params.picture_revisions,
        choice=params.row_choice,
    threads: 2
    resources:
        mem_mb=4_000,
        disk_mb=8_000,
        runtime=2_880,
        pod_template="fetch",
    message:
        "Fetching the pictures that the {wildcards.split} split of {wildcards.dataset} names"
    script:
        "../scripts/stages/fetch_images.py"
