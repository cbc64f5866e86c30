# The pictures that the rows of a split name.
#
# Needs: the raw rows of a split, and fixed ones if any, and the data set's picture roots; with fetch_images, the
#        account of the fetched pictures.
# Makes: images/{dataset}/{split}.jsonl, a line for every distinct path that the rows name: which picture it is, or why
#        it cannot be used. The picture store, stores.pictures/{dataset}/, is not a declared output: it has a link for
#        every usable picture, or an upright RGB copy if its pixels had to be rewritten. Pictures that are in the rows
#        themselves are written to stores.pictures/.embedded/, the first root.
#        With cluster.pods_per_stage = N, each of N pods takes every N-th path, and join_images joins their manifests.
# Holds: every picture that has a name was decoded to the last pixel; nothing outside the roots is read; the same bytes
#        on any number of cores and pods. The files below the roots are not watched: after you add pictures there, force
#        this rule.

manifest_of_part = f"images/{{dataset}}/{{split}}{names.part}.jsonl"


rule resolve_images:
    """Find, check and name every picture that the rows name."""
    input:
        branch(
            lookup(dpath="datasets/{dataset}/fetch_images", within=config),
            then="images/{dataset}/{split}.fetched.json",
        ),
        raw=inputs.raw,
        raw_accounts=inputs.raw_accounts,
        fixed_rows=inputs.fixed_rows,
    output:
        manifest=temp(manifest_of_part) if names.part else manifest_of_part,
    log:
        f"logs/resolve_images/{{dataset}}.{{split}}{names.part}.log",
    benchmark:
        f"benchmarks/resolve_images/{{dataset}}.{{split}}{names.part}.tsv"
    params:
        dataset="{dataset}",
        roots=params.picture_roots,
        store=lookup(dpath="stores/pictures", within=config),
        choice=params.row_choice,
        limits=lookup(dpath="datasets/{dataset}/picture_limits", within=config),
        part=params.part,
    threads: 8
    resources:
        mem_mb=8_000,  # on each core a picture of max_pixels (18 bytes each) and max_bytes
        disk_mb=8_000,
        runtime=240,
    message:
        "Checking the pictures that the {wildcards.split} split of {wildcards.dataset} names: {output}"
    script:
        "../scripts/stages/resolve_images.py"


if names.part:

    rule join_images:
        """Join the manifests of a split's parts."""
        input:
            parts=inputs.per_part(manifest_of_part),
        output:
            manifest="images/{dataset}/{split}.jsonl",
        log:
            "logs/join_images/{dataset}.{split}.log",
        benchmark:
            "benchmarks/join_images/{dataset}.{split}.tsv"
        params:
            dataset="{dataset}",
        threads: 1
        resources:
            mem_mb=1_000,
            disk_mb=2_000,
            runtime=30,
        message:
            "Joining the image manifests of the {wildcards.split} split of {wildcards.dataset}"
        script:
            "../scripts/stages/join_images.py"
