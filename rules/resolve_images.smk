# The pictures that the rows of a split name.
#
# Needs: the raw JSON array of a split, and the data set's picture roots.
# Makes: images/{dataset}/{split}.jsonl, a line for every distinct path that the rows name: which picture it
#        is, or why it cannot be used. The picture store, stores.pictures/{dataset}/, is no declared output:
#        it holds a link for every usable picture, and an upright RGB copy where the pixels need it.
# Holds: every picture that has a name was decoded to the last pixel; nothing outside the roots is read; the
#        same bytes whatever the number of cores. The files below the roots are not watched: when pictures
#        were added there, force this rule.


rule resolve_images:
    """Find, check and name every picture that the rows name."""
    input:
        raw=targets.raw_of(settings),
    output:
        manifest="images/{dataset}/{split}.jsonl",
    log:
        "logs/resolve_images/{dataset}.{split}.log",
    benchmark:
        "benchmarks/resolve_images/{dataset}.{split}.tsv"
    params:
        code=code("resolve_images"),
        dataset="{dataset}",
        roots=lookup(dpath="datasets/{dataset}/image_roots", within=config),
        store=lookup(dpath="stores/pictures", within=config),
        limits=lookup(dpath="datasets/{dataset}/picture_limits", within=config),
    threads: 8
    resources:
        mem_mb=8_000,
        disk_mb=2_000,
        runtime=240,
    message:
        "Checking the pictures that the {wildcards.split} split of {wildcards.dataset} names"
    script:
        "../scripts/resolve_images.py"
