# The length of every row in tokens, before a GPU is requested.
#
# Needs: validated rows, the image manifest of the train split if they have pictures, the base model's tokenizer
#        and picture rule.
# Makes: lengths/{run}/{train,val}.jsonl, a line per row: id, its bytes in the file, text tokens, picture tokens
#        after the picture budget; lengths/{run}/summary.json: sums, quantiles, the longest rows, the max_length that
#        covers 99.9 % of train and of val, and all rows; digests of the rows, of the model's files and of the result.
# Holds: every row is measured; ms-swift's own template gives the same lengths on some rows of every run, the
#        extremes among them, and the model's own chat template the same tokens (or the run's model accepts a
#        difference); the base has the tensors that its configuration needs. train.max_length has no influence: a new
#        value measures nothing again.


rule measure_lengths:
    """Count the tokens of every row, text and pictures apart."""
    input:
        train_rows=inputs.data("train.jsonl"),
        val_rows=inputs.data("val.jsonl"),
        stats=inputs.data("stats.json"),
        pictures=inputs.train_pictures,
        model_files=inputs.model_files,
    output:
        train="lengths/{run}/train.jsonl",
        val="lengths/{run}/val.jsonl",
        summary="lengths/{run}/summary.json",
    log:
        "logs/measure_lengths/{run}.log",
    benchmark:
        "benchmarks/measure_lengths/{run}.tsv"
    params:
        settings=params.run(*params.lengths),
        template_differs=params.run("model.template_differs"),
        picture_store=lookup(dpath="stores/pictures", within=config),
    threads: 8
    resources:
        mem_mb=8_000,
        disk_mb=8_000,
        runtime=60,
        pod_template="train",
    message:
        "Counting the tokens of every row for {wildcards.run}"
    script:
        "../scripts/stages/measure_lengths.py"
