"""A model in this process that answers dialogues, for a person who tries it: no server, no port."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from vlmflow.core.errors import VlmflowError
from vlmflow.merging.logits import OFFLINE, does_not_load, load
from vlmflow.rows.chat import Turn, declarations_of, messages_of
from vlmflow.serving.client import Answer
from vlmflow.serving.finished_run import FinishedRun, link_served


class LoadedModel:
    """A model with its processor.

    folder: made by `served_folder`, so that pictures have the run's limits. device: cpu, or cuda; several GPUs share
    the model. dtype: the type in which it computes.

    Raises VlmflowError if it does not load offline, or does not fit into memory.
    """

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        disable_progress_bar()
        try:
            sees = hasattr(AutoConfig.from_pretrained(folder, **OFFLINE), "vision_config")
            self._processor = (AutoProcessor if sees else AutoTokenizer).from_pretrained(folder, **OFFLINE)
        except (OSError, ValueError) as error:
            raise does_not_load(folder, error) from None
        with _in_memory(device):
            self._model = load(folder, device, dtype)

    def answer(
        self, turns: Sequence[Turn], pictures: Sequence[Image.Image], most_tokens: int, tools: str = ""
    ) -> Answer:
        """Return the greedy answer to a dialogue, of at most `most_tokens` tokens.

        pictures: in RGB, one for each picture tag of the turns, in their order. tools: as in a row.
        """
        messages = messages_of(turns, [{"type": "image", "image": picture} for picture in pictures])
        given = {"tools": declarations_of(tools), "return_dict": True, "return_tensors": "pt"}
        inputs = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **given)
        inputs = inputs.to(self._model.device)
        with torch.inference_mode(), _in_memory(self._model.device.type):
            output = self._model.generate(**inputs, max_new_tokens=most_tokens, do_sample=False)
        tokens = output[0, inputs["input_ids"].shape[1] :]
        ends = self._model.generation_config.eos_token_id  # one, several, or None
        cut = len(tokens) == most_tokens and int(tokens[-1]) not in (ends if isinstance(ends, list) else [ends])
        return Answer(self._processor.decode(tokens, skip_special_tokens=True), cut)


def load_both(run: FinishedRun, scratch: Path) -> tuple[LoadedModel, LoadedModel]:
    """Load a run's base and its tuned weights, each through a folder of links with the run's picture limits.

    scratch: where these folders are made. A GPU is used if there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def loaded(name: str, model: Path) -> LoadedModel:
        print(f"loading {name} ({device}): {model}", file=sys.stderr, flush=True)
        link_served(model, scratch / name, run.settings.image_max_tokens)
        return LoadedModel(scratch / name, device, run.settings.dtype)

    return loaded("base", run.base()), loaded("tuned", run.merged)


@contextmanager
def _in_memory(device: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise VlmflowError(
            f"base and tuned do not fit together into the memory of {device}",
            "serve one of them: vlmflow serve RUN",
        ) from None
