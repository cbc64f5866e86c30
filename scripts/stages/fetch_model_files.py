"""Fetch a base model's files other than its weights: configuration, tokenizer, picture rule."""

from pathlib import Path

from vlmflow.config.model_types import BaseChat, Day
from vlmflow.config.source import parse_source
from vlmflow.config.tables import PINS, pin_of, read_pins
from vlmflow.core.account import read_account
from vlmflow.core.files import whole_folder
from vlmflow.fetch.chat_templates import own_files
from vlmflow.fetch.dequantise import without_scales, written_small_files
from vlmflow.fetch.model_files import list_files, refuse_code
from vlmflow.fetch.model_weights import tensor_names
from vlmflow.fetch.placed import MANIFEST, SmallFiles, read_small_files, small_names, write_small_files
from vlmflow.harness.stage import run_stage


def main(
    *,
    files: Path,
    source: str,
    store: Path,
    pins: Path = PINS,
    dequantize: bool = False,
    base: list[Path] | None = None,
    chat_template: BaseChat | None = None,
    date: Day | None = None,
    stop_tokens: list[str] | None = None,
    threads: int = 1,
) -> None:
    """Fetch them.

    files: the folder to write (model_files/MODEL).
    source: hf://OWNER/NAME or hf://OWNER/NAME@COMMIT, file:///PATH, the path of a folder, or merged/RUN.
    store: the folder for files from the hub, by repository and revision. pins: the table with revisions of hub sources.
    dequantize: whether the model is in FP8, and what is written is of the bfloat16 base that `fetch_model` makes of it.
    base: the small files of RUN's own model (model_files/MODEL), if the source is merged/RUN: it has the same, but for
    the limits of pictures' sizes, which each run sets. chat_template, date, stop_tokens: see ModelSettings.
    threads: files that are fetched at a time.
    """
    origin = parse_source(source)
    revision: str | None = None
    if base:
        of_base = read_account(base[0] / MANIFEST, SmallFiles)
        folder, names, tensors = read_small_files(base[0]), list(of_base.files), of_base.tensors
    elif isinstance(origin, Path):
        folder, names = origin, list_files(origin, source, weights=False).names
        refuse_code(folder, names, weights=False, dequantize=dequantize)
        tensors = tensor_names(folder, names)
    else:
        from vlmflow.fetch.from_hub import fetch_small_files, pinned  # the import of the hub's client is slow

        pin = pin_of(source, read_pins(pins))
        folder, names, tensors = fetch_small_files(origin, pin, store, threads, dequantize=dequantize)
        _, revision = pinned(origin, pin)
    written: dict[str, bytes] = {}
    if dequantize:
        written = written_small_files(folder, names)
        tensors = None if tensors is None else without_scales(tensors)
    with whole_folder(files) as unfinished_folder:
        own = written | own_files(folder, names, chat_template, date, stop_tokens or ())
        write_small_files(unfinished_folder, folder, small_names(names), source, revision, tensors, own)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
