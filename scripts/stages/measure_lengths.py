"""Count the tokens of every row of train and val, of text and pictures separately; runs on the CPU."""

from itertools import chain
from pathlib import Path

from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import PartOf
from vlmflow.core.account import write_account
from vlmflow.core.errors import log
from vlmflow.fetch.chat_templates import require_chat_template
from vlmflow.fetch.placed import read_small_files, tensors_of
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.against_swift import refuse_other_architecture
from vlmflow.lengths.count import TokenCounter
from vlmflow.lengths.measure import in_words, measure_lengths
from vlmflow.pictures.manifest import read_picture_manifest
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
    train: Path,
    val: Path,
    summary: Path,
    settings: PartOf[FlatRun],
    template_differs: bool,
    picture_store: Path,
    pictures: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Measure the rows of one run.

    train_rows, val_rows, stats: the validated data set. pictures: the image manifests of the train and val splits; none
    if rows have no pictures.
    model_files: the base model without its weights (model_files/MODEL).
    train, val, summary: the files to write: a line per row (vlmflow.lengths.count.RowLength), and their account.
    settings: those of the run. template_differs: that of its model.
    picture_store: the folder with all picture stores.
    """
    data = validated_data(train_rows, val_rows, stats, picture_store, pictures or [])
    settings = named(settings, read_small_files(model_files))
    base = BaseModel.without_weights(model_files, settings.model_type)
    refuse_other_architecture(base.folder, settings.model_type)
    require_chat_template(base.folder)
    entries = chain.from_iterable(map(read_picture_manifest, pictures or []))
    form = ChatForm.of(settings.text_args, data.last_answer_only)
    counter = TokenCounter(base.folder, entries, settings.image_max_tokens, form)
    files = {"train": train, "val": val}
    how = settings.image_max_tokens, settings.text_args, threads, template_differs
    account = measure_lengths(data, files, counter, base, *how, tensors_of(model_files))
    write_account(summary, account)
    log.info(f"{summary.parent.name}: {in_words(account)}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
