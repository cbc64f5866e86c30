"""Describe a base model in a manifest, and link its files, which are in the store or in a local folder."""

import shutil
from pathlib import Path

from msgspec import UNSET, UnsetType

from vlmflow.config.model_types import BaseChat, Day
from vlmflow.config.source import parse_source
from vlmflow.config.tables import PINS, pin_of, read_pins
from vlmflow.core.account import write_account
from vlmflow.core.files import whole_folder
from vlmflow.fetch import placed
from vlmflow.fetch.chat_templates import own_files
from vlmflow.fetch.dequantise import dequantised
from vlmflow.fetch.model_files import list_files, log_left_out, refuse_code
from vlmflow.fetch.model_weights import refuse_other_tensors
from vlmflow.fetch.placed import InFp8, ModelManifest, digest_of, hash_files
from vlmflow.harness.stage import run_stage


def main(
    *,
    model: Path,
    source: str,
    store: Path,
    pins: Path = PINS,
    dequantize: bool = False,
    merged: list[Path] | None = None,
    chat_template: BaseChat | None = None,
    date: Day | None = None,
    stop_tokens: list[str] | None = None,
    threads: int = 1,
) -> None:
    """Fetch one model.

    model: the folder to write; it will contain only manifest.json, and the provenance of weights of a run.
    source: hf://OWNER/NAME or hf://OWNER/NAME@COMMIT, file:///PATH, the path of a folder, or merged/RUN.
    store: the folder for files from the hub, by repository and revision, and for links to the files of models.
    pins: the table with revision, size and sha256 of hub sources.
    dequantize: whether the model is in FP8, and becomes bfloat16, in the store too.
    merged: the folder merged/RUN, if that is the source. chat_template, date, stop_tokens: see ModelSettings.
    threads: files that are fetched and read at a time.
    """
    origin = parse_source(source)
    revision: str | None
    left_out: list[str]
    if merged:
        revision, (folder,) = None, merged
        files, left_out = placed.published_files(folder, threads), []
        refuse_code(folder, list(files))
    elif isinstance(origin, Path):
        revision, folder = None, origin
        listed = list_files(folder, source)
        refuse_code(folder, listed.names, dequantize=dequantize)
        files, left_out = hash_files(folder, listed.names, threads), listed.left_out
    else:
        from vlmflow.fetch.from_hub import fetch_model, pinned  # the import of the hub's client is slow

        pin = pin_of(source, read_pins(pins))
        folder, files, left_out = fetch_model(origin, pin, store, threads, dequantize=dequantize)
        _, revision = pinned(origin, pin)
    refuse_other_tensors(folder, files)
    log_left_out(source, left_out)
    in_fp8: InFp8 | UnsetType = UNSET
    if dequantize:
        in_fp8 = InFp8(folder.resolve(), dict(sorted(files.items())), digest_of(files))
        folder, files = dequantised(store, folder, files, threads)
    own = own_files(folder, files, chat_template, date, stop_tokens or ())
    view, files = placed.link_files(store, model.name, folder, files, own, of_target=bool(merged))
    with whole_folder(model) as unfinished_folder:
        if merged:
            shutil.copyfile(folder / placed.PROVENANCE, unfinished_folder / placed.PROVENANCE)
        seen = ModelManifest(model.name, source, revision, view, files, sorted(left_out), digest_of(files), in_fp8)
        write_account(unfinished_folder / placed.MANIFEST, seen)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
