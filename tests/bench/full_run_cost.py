"""The cost of the run qwen3vl-fire, by arithmetic from real rows: python tests/bench/full_run_cost.py [FOLDER]

FOLDER (default runs/fire-demo) is that of `make fire-demo`. This is an estimate, not measured on GPUs; the gate of the
smoke run gives the run's own figure, from its own GPUs, before the full run starts.
"""

import json
import sys
from pathlib import Path

ROWS = 104_941
"""Rows of FIRE-train-100K.json (its data card)."""

CHARACTERS_PER_TOKEN = 4.2
"""English under Qwen's tokenizer; between 4 and 4.5 for such texts."""

PIXELS_PER_TOKEN = 32 * 32
"""Qwen3-VL merges 2 x 2 patches of 16 pixels into one token."""

IMAGE_MAX_TOKENS = 1024
"""The configuration's default for image_max_tokens."""

PARAMETERS = 33.4e9
"""Qwen3-VL-32B: 66.7 GB of weights in bfloat16."""

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""2 forward, 2 backward for the activations alone (the weights are frozen), 2 forward again for checkpointing."""

GPUS = 4
PEAK_FLOPS = {"A100 80 GB": 312e12, "H100 80 GB": 989e12}
"""Dense bfloat16, by NVIDIA's data sheets."""

SHARE_OF_PEAK = (0.2, 0.4)
"""The share of the peak that such a training reaches with zero3 on one node, low and high."""


def main(folder: Path) -> None:
    """Print tokens per row, and hours per kind of GPU."""
    if not (folder / "images/fire/train.jsonl").is_file():
        sys.exit(f"{folder}: no data of a FIRE run is there; first: make fire-demo FIRE=FOLDER")
    pictures = {}
    for line in (folder / "images/fire/train.jsonl").read_text().splitlines():
        entry = json.loads(line)
        pictures[entry["name"]] = min(IMAGE_MAX_TOKENS, entry["width"] * entry["height"] / PIXELS_PER_TOKEN)
    rows = [json.loads(line) for line in (folder / "data/fire/train.jsonl").read_text().splitlines()]
    characters = sum(len(turn["value"]) for row in rows for turn in row["conversations"]) / len(rows)
    picture = sum(pictures[row["images"][0]] for row in rows) / len(rows)
    tokens = characters / CHARACTERS_PER_TOKEN + picture
    work = tokens * ROWS * PARAMETERS * FLOPS_PER_PARAMETER_AND_TOKEN
    print(f"{len(rows)} rows: {characters:.0f} characters and {picture:.0f} picture tokens, {tokens:.0f} tokens a row")
    print(f"{ROWS:,} rows: {tokens * ROWS / 1e6:.0f} million tokens, {work:.2g} floating-point operations")
    for gpu, peak in PEAK_FLOPS.items():
        low, high = (work / (GPUS * peak * share) / 3600 for share in reversed(SHARE_OF_PEAK))
        print(f"{GPUS} x {gpu}: {low:.0f} to {high:.0f} hours")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/fire-demo"))
