"""Model folders in plain transformers, without network, and the logits that they give for rows."""

import gc
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from vlmflow.core.errors import VlmflowError
from vlmflow.merging.proof import MERGE_AGAIN
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.swift import encoded_rows
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment, run_module
from vlmflow.swift.row_attention import Inputs, rows_in

OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""Options for loading folders: fetch nothing, and run no Python in them."""


def inputs_of(
    rows: Sequence[ShareGptRow], arguments: dict[str, object], pictures: Path, image_max_tokens: int, threads: int = 1
) -> list[Inputs]:
    """Return the inputs of each row.

    arguments: ms-swift's, of a model's folder and its template (`template_arguments`). pictures: the store of the rows'
    pictures. image_max_tokens: see TrainSettings. threads: the number of cores to use.

    Raises VlmflowError if ms-swift does not load the folder's processor offline, or refuses a row.
    """
    with tempfile.TemporaryDirectory(prefix="vlmflow-logits-") as scratch:
        folder = Path(scratch)
        lines, made = folder / "rows.jsonl", folder / "inputs.safetensors"
        lines.write_bytes(b"".join(as_line(row, row.images) + b"\n" for row in rows))
        words = [encoded_rows.INPUTS, str(lines), str(made), *as_words(arguments)]
        env = environment(pictures, image_max_tokens, folder / "cache", threads)
        label = f"{arguments['model']}: rows for the logits"
        run_module(encoded_rows.__name__, words, folder, env, folder / "log", label)
        return rows_in(load_file(made))


def load(folder: Path, device: str, dtype: str, **values: Any) -> PreTrainedModel:
    """Load a model without network, every weight from the folder.

    device: cpu, or cuda; several GPUs share one model. dtype: the type in which it computes. values: further arguments
    of `from_pretrained`; with state_dict, weights by their names in files, the folder gives its configuration alone.

    Raises VlmflowError if the folder does not load, or lacks weights.
    """
    several = device == "cuda" and torch.cuda.device_count() > 1
    try:
        config = AutoConfig.from_pretrained(folder, **OFFLINE)
        config._attn_implementation = None  # transformers' default for this machine, whatever the owner's had
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        loader = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        if "state_dict" in values:
            loader = loader._model_mapping[type(config)]  # an automatic class would look into the folder
        model, report = loader.from_pretrained(
            None if "state_dict" in values else folder,
            config=config,
            dtype=getattr(torch, dtype),
            device_map="auto" if several else device,
            **OFFLINE,
            **values,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise does_not_load(folder, error) from None
    if missing := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise does_not_load(folder, f"no fitting weights for {missing[0]}")
    return model.eval()


def logits_of(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], positions: int) -> torch.Tensor:
    """Return the logits of a row's last positions in float32: positions by vocabulary.

    Pictures take the type in which the model computes.
    """
    with torch.inference_mode():
        placed = {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }
        return model(**placed, logits_to_keep=positions).logits[0].float().cpu()


def free(device: str) -> None:
    """Give the memory of models that nobody refers to back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def does_not_load(folder: Path, why: object) -> VlmflowError:
    """Return the error for a folder that transformers cannot load."""
    return VlmflowError(f"{folder}: does not load offline with transformers: {why}", MERGE_AGAIN)
