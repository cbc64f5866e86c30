"""Keep the rows that fit the run's max_length, and record what happened to the others; runs on the CPU."""

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import PartOf
from vlmflow.core.account import read_account
from vlmflow.core.errors import log
from vlmflow.core.files import whole_folder
from vlmflow.fetch.placed import read_small_files
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.count import Counter, TokenCounter
from vlmflow.lengths.fit import fit_rows, in_words
from vlmflow.lengths.measure import TemplateCounter, refuse_other_lengths
from vlmflow.lengths.summary import text_digests
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.rows.stats import Stats
from vlmflow.rows.training_data import validated_data
from vlmflow.swift.arguments import BaseModel
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.template_texts import named


def main(
    *,
    train_rows: Path,
    val_rows: Path,
    stats: Path,
    model_files: Path,
    train_lengths: Path,
    val_lengths: Path,
    summary: Path,
    fitted: Path,
    settings: PartOf[FlatRun],
    picture_store: Path,
    pictures: list[Path] | None = None,
) -> None:
    """Fit the rows of one run.

    train_rows, val_rows, stats: the validated data set. pictures: the image manifests of the train and val splits; none
    if rows have no pictures.
    model_files: the base model without its weights (model_files/MODEL).
    train_lengths, val_lengths, summary: the files of measure_lengths.
    fitted: the folder to write (fitted/RUN). settings: those of the run.
    picture_store: the folder with all picture stores.
    """
    account = read_account(stats, Stats)
    lengths = {"train": train_lengths, "val": val_lengths}
    settings = named(settings, read_small_files(model_files))
    base = BaseModel.without_weights(model_files, settings.model_type)
    text = settings.image_max_tokens, settings.text_args
    measured = refuse_other_lengths(summary, lengths, account, base.folder, *text)
    data = validated_data(train_rows, val_rows, stats, picture_store, pictures or [])

    def counter() -> Counter:
        if measured.by_template:
            return TemplateCounter.of_run(base, data, *text, scratch)
        entries = chain.from_iterable(map(read_picture_manifest, pictures or []))
        form = ChatForm.of(settings.text_args, data.last_answer_only)
        return TokenCounter(base.folder, entries, settings.image_max_tokens, form)

    with whole_folder(fitted) as folder, TemporaryDirectory(prefix="vlmflow-fit-") as made:
        scratch = Path(made)
        how = settings.max_length, settings.over_long
        facts = measured.chat_template, measured.one_sequence
        outcome = fit_rows(data, account, lengths, counter, *how, folder, *facts, model=text_digests(base.folder))
    log.info(f"{fitted.name}: {in_words(outcome)}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
