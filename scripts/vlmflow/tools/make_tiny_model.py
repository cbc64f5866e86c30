"""Make the demo's model: a tiny Qwen3-VL with random weights and a tokenizer learned from given text."""

import os
from pathlib import Path

import transformers

from vlmflow.demo.tiny_model import TinyShape, fire_texts, write_tiny_model
from vlmflow.harness.stage import run_stage


def main(*, folder: Path, text: list[Path], shape: TinyShape | None = None, seed: int = 42) -> None:
    """Write the model folder; the same arguments give the same bytes.

    folder: the folder to write; an existing one is replaced.
    text: raw FIRE files; the tokenizer is learned from their questions, answers and feedback.
    shape: values that differ from the defaults of TinyShape, for example "{hidden_size: 64, merges: 512}".
    seed: the seed of the weights.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no GPU
    transformers.logging.disable_progress_bar()
    write_tiny_model(folder, fire_texts(text), shape or TinyShape(), seed)


if __name__ == "__main__":
    run_stage(main)
