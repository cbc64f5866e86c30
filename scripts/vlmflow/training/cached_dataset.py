"""A run's rows as ms-swift's cached data set: read, converted and measured once, before a GPU is requested."""

import tempfile
from collections import Counter
from pathlib import Path

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import count_lines
from vlmflow.core.integrity import digests_of, refuse_changed
from vlmflow.core.progress import Progress
from vlmflow.lengths.count import read_lengths
from vlmflow.swift import export
from vlmflow.swift.arguments import Training, as_words
from vlmflow.swift.child_process import environment, run_module

DIGESTS = "digests.json"

CachedFiles = dict[str, str]
"""The account of a cached data set (`cached/RUN/digests.json`): SHA-256 of every file, by its path in the folder."""


def cache_dataset(training: Training, rows: Path, cached: Path, processes: int, what: str) -> None:
    """Write the cached data set of a run into the folder `cached`: train/ and val/, for `--cached_dataset`.

    ms-swift 4.6 caches rows in its own form and their lengths, in the order of the file, so a training from it gives
    the same losses as without it. Pictures stay in the store; the trainers' workers scale them.
    rows: the folder of `fit_rows`. what: the stage and run, for messages.
    processes: processes that read pictures, at least two; their number does not change the bytes.

    Raises VlmflowError if ms-swift fails, or if its rows or lengths differ from those of `rows`.
    """
    with tempfile.TemporaryDirectory(prefix="vlmflow-cached-") as scratch:
        folder = Path(scratch)
        env = environment(training.data.pictures, training.settings.image_max_tokens, folder / "cache", 1)
        with Progress(what, count_lines(training.data.train) + count_lines(training.data.val), "rows") as progress:
            run_module(export.__name__, arguments(training, cached, processes), folder, env, folder / "log", what)
            progress.advance(progress.total)
    for split in ("train", "val"):
        _refuse_other_rows(cached / split, rows / f"{split}.lengths.jsonl")
    files = sorted(file.relative_to(cached).as_posix() for file in cached.rglob("*") if file.is_file())
    account: CachedFiles = digests_of(cached, files)
    write_account(cached / DIGESTS, account)


def refuse_changed_cache(cached: Path) -> None:
    """Refuse a cached data set whose files have changed since `cache_dataset` wrote them.

    Raises VlmflowError with their names.
    """
    digests = read_account(cached / DIGESTS, CachedFiles)
    next_step = f"remove {cached} and run the same command again: the workflow makes it again"
    refuse_changed("row files", cached, digests, f"cached/{cached.name}", next_step)


def arguments(training: Training, cached: Path, processes: int) -> list[str]:
    """Return the arguments of `swift export`: the run's settings that determine rows, order and lengths."""
    settings = training.settings
    return as_words(
        {
            "model": training.model.folder.absolute(),
            "model_type": training.model.model_type,
            "dataset": training.data.train.absolute(),
            "val_dataset": training.data.val.absolute(),
            "max_length": settings.max_length,
            "strict": True,
            "dataset_shuffle": False,  # as in the training
            "loss_scale": training.data.loss_scale,
            "seed": settings.seed,
            "data_seed": settings.seed,
            "torch_dtype": settings.dtype,
            "dataset_num_proc": max(2, processes),  # with 1 it writes another state.json
            "to_cached_dataset": True,
            "exist_ok": True,  # the folder is ours and empty
            "load_args": False,  # those of a model's folder may name Python files
            "output_dir": cached.absolute(),
            **settings.text_args,
        }
    )


def _refuse_other_rows(cached: Path, lengths: Path) -> None:
    """Compare all lengths that ms-swift wrote with ours; its order differs."""
    from datasets import load_from_disk

    theirs = Counter(length for row in load_from_disk(str(cached))["lengths"] for length in row)
    ours = Counter(row.tokens for row in read_lengths(lengths))
    if theirs != ours:
        raise VlmflowError(
            f"{cached}: ms-swift cached {theirs.total()} rows of {(+(theirs - ours)).total()} other lengths; "
            f"{lengths} has {ours.total()} rows",
            f"run the earlier stages again: snakemake --forcerun measure_lengths -- {cached.parent}",
        )
