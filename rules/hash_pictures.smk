# Perceptual hashes of a split's pictures, to find pictures that look alike.
#
# Needs: the split's image manifest, and the picture store.
# Makes: images/{dataset}/{split}.hashes.jsonl, a perceptual hash of 64 bits for every usable picture, by its SHA-256.
#        With cluster.pods_per_stage = N, each of N pods takes every N-th picture, and join_hashes joins their tables.
# Holds: every usable picture once; the same bytes on any number of cores and pods. The manifest does not change, and
#        merged weights need this rule only with near_duplicates.drop.

hashes_of_part = f"images/{{dataset}}/{{split}}{names.part}.hashes.jsonl"


rule hash_pictures:
    """Hash every usable picture by what it looks like."""
    input:
        manifest="images/{dataset}/{split}.jsonl",
    output:
        hashes=temp(hashes_of_part) if names.part else hashes_of_part,
    log:
        f"logs/hash_pictures/{{dataset}}.{{split}}{names.part}.log",
    benchmark:
        f"benchmarks/hash_pictures/{{dataset}}.{{split}}{names.part}.tsv"
    params:
        dataset="{dataset}",
        picture_store=lookup(dpath="stores/pictures", within=config),
        part=params.part,
    threads: 8
    resources:
        mem_mb=8_000,  # as in resolve_images
        disk_mb=1_000,
        runtime=120,
    message:
        "Hashing the pictures of the {wildcards.split} split of {wildcards.dataset}: {output}"
    script:
        "../scripts/stages/hash_pictures.py"


if names.part:

    rule join_hashes:
        """Join the hashes of a split's parts."""
        input:
            parts=inputs.per_part(hashes_of_part),
        output:
            hashes="images/{dataset}/{split}.hashes.jsonl",
        log:
            "logs/join_hashes/{dataset}.{split}.log",
        benchmark:
            "benchmarks/join_hashes/{dataset}.{split}.tsv"
        threads: 1
        resources:
            mem_mb=1_000,
            disk_mb=1_000,
            runtime=30,
        message:
            "Joining the hashes of the pictures of the {wildcards.split} split of {wildcards.dataset}"
        script:
            "../scripts/stages/join_hashes.py"
