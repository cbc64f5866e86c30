# What the pictures of a split look like, as numbers that can be compared.
#
# Needs: the split's image manifest, and the picture store.
# Makes: images/{dataset}/{split}.hashes.jsonl, a perceptual hash of 64 bits for every usable picture, by its SHA-256.
#        With cluster.pods_per_stage so many pods take every N-th picture each, and join_hashes joins their tables.
# Holds: every usable picture once; the same bytes whatever the number of cores and pods. The manifest stays as it is,
#        and the road to merged weights does without this rule unless near_duplicates.drop is set.

part = targets.part_suffix(settings)
hashes_of_part = f"images/{{dataset}}/{{split}}{part}.hashes.jsonl"


rule hash_pictures:
    """Hash every usable picture by what it looks like."""
    input:
        manifest="images/{dataset}/{split}.jsonl",
    output:
        hashes=temp(hashes_of_part) if part else hashes_of_part,
    log:
        f"logs/hash_pictures/{{dataset}}.{{split}}{part}.log",
    benchmark:
        f"benchmarks/hash_pictures/{{dataset}}.{{split}}{part}.tsv"
    params:
        code=code("hash_pictures"),
        dataset="{dataset}",
        picture_store=lookup(dpath="stores/pictures", within=config),
        part=targets.part_of(settings),
    threads: 8
    resources:
        mem_mb=8_000,  # as in resolve_images
        disk_mb=1_000,
        runtime=120,
    message:
        "Hashing the pictures of the {wildcards.split} split of {wildcards.dataset}: {output}"
    script:
        "../scripts/hash_pictures.py"


if part:

    rule join_hashes:
        """Join the hashes of a split's parts."""
        input:
            parts=targets.parts_of(settings, hashes_of_part),
        output:
            hashes="images/{dataset}/{split}.hashes.jsonl",
        log:
            "logs/join_hashes/{dataset}.{split}.log",
        benchmark:
            "benchmarks/join_hashes/{dataset}.{split}.tsv"
        params:
            code=code("join_hashes"),
        threads: 1
        resources:
            mem_mb=1_000,
            disk_mb=1_000,
            runtime=30,
        message:
            "Joining the hashes of the pictures of the {wildcards.split} split of {wildcards.dataset}"
        script:
            "../scripts/join_hashes.py"
