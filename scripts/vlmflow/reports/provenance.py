"""Where merged weights come from: digests of everything from the raw file to the weights, and how to read it."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from vlmflow.fetch.model_folder import ModelManifest
from vlmflow.files import read_json, sha256_of

PACKAGES = (
    "snakemake",
    "ms-swift",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "pillow",
    "msgspec",
)

COMMIT_VARIABLE = "VLMFLOW_COMMIT"
"""Names the commit where there is no checkout, as in an image."""


def provenance(
    run: str,
    stats: Path,
    manifest: ModelManifest,
    smoke: Path,
    full: Path,
    merged: Path,
    proofs: dict[str, Any],
    code: Path,
) -> dict[str, Any]:
    """Gather what the stages left, into the content of `provenance.json`.

    stats: the data set's account. manifest: of the base model. smoke, full: the training's folders.
    merged: the folder with the merged weights. proofs: what the verification found.
    code: the checkout, for its commit. Each stage wrote its own settings into what it left.
    """
    report = read_json(full / "report.json")
    data = read_json(stats)
    return {
        "run": run,
        "data": data,
        "base_model": {
            "source": manifest.source,
            "revision": manifest.revision,
            "digest": manifest.digest,
            "files": {name: record.sha256 for name, record in manifest.files.items()},
        },
        "smoke": read_json(smoke / "gate.json"),
        "training": {key: value for key, value in report.items() if key != "losses"},
        "verification": proofs,
        "merged": {
            file.relative_to(merged).as_posix(): sha256_of(file)
            for file in sorted(merged.rglob("*"))
            if file.is_file() and file != merged / "README.md"  # the model card of these facts replaces it
        },
        "git_commit": git_commit(code),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def git_commit(code: Path) -> str | None:
    """Give the commit of the checkout `code`, marked "+changes" where files differ; None where there is none."""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    try:
        head = _git(code, "rev-parse", "HEAD")
        return head + ("+changes" if _git(code, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(code: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(code), *words], capture_output=True, text=True, check=True).stdout.strip()


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def model_card(facts: dict[str, Any]) -> str:
    """Write the README.md of merged weights from their provenance, with the hub's metadata block on top."""
    data, training, base = facts["data"], facts["training"], facts["base_model"]
    best = training["best"]
    splits = [name for name in ("train", "test") if name in data]
    counts = "\n".join(
        f"| {name} | {data[name]['rows_in']} | {data[name]['kept']} | {sum(data[name]['rejected'].values())} |"
        for name in splits
    )
    proofs = [(_tensors_in_words, "tensors"), (_logits_in_words, "logits")]
    checks = "\n".join(
        "- " + in_words(facts["verification"][name]) for in_words, name in proofs if facts["verification"][name]
    )
    base_line = f"base_model: {json.dumps(base['source'].removeprefix('hf://'))}\n" if base["revision"] else ""
    return f"""---
library_name: transformers
{base_line}tags: [vlmflow, lora, merged]
---
# {facts["run"]}

{base["source"]} with a LoRA adapter trained on the data set `{data["dataset"]}` ({data["form"]} form), merged
into the weights and verified. Every digest stands in `provenance.json`.

## Data

| raw split | rows in | kept | rejected |
|---|---:|---:|---:|
{counts}

Training rows: {data["examples"]["train"]:,} train, {data["examples"]["val"]:,} val; the test split
({data["examples"]["test"]:,}) was not looked at.

## Training

{training["steps"]} optimizer steps on {training["world_size"]} process(es) ({training["device"]},
{training["strategy"]}), {training["tokens"]:,} tokens in {training["seconds"]:,} s. The adapter is that of
step {best["step"]}, with the lowest validation loss: {best["eval_loss"]:.4f}.

## Verification

{checks}

## Use

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

processor = AutoProcessor.from_pretrained("PATH OF THIS FOLDER")
model = AutoModelForImageTextToText.from_pretrained("PATH OF THIS FOLDER", dtype="auto", device_map="auto")
content = [{{"type": "image", "path": "PICTURE"}}, {{"type": "text", "text": "What is in the picture?"}}]
inputs = processor.apply_chat_template(
    [{{"role": "user", "content": content}}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
).to(model.device)
answer = model.generate(**inputs, max_new_tokens=200)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(answer, skip_special_tokens=True))
```
"""


def _tensors_in_words(proof: dict[str, Any]) -> str:
    return f"""Tensors: {proof["touched"]} of {proof["tensors"]} carry the adapter; each equals W + s · BA within
  {proof["largest_deviation"]:.2f} units of the last stored bit (rounding alone reaches 0.5). The other
  {proof["untouched"]} are the base model's, byte for byte."""


def _logits_in_words(proof: dict[str, Any]) -> str:
    return f"""Logits on {proof["rows"]} rows of the val split ({proof["positions"]:,} tokens, {proof["dtype"]},
  {proof["device"]}): base + adapter in peft and the merged weights differ by {proof["deviation"]:.2%} of the logits'
  spread (rounding explains up to {proof["allowed_deviation"]:.2%}); the adapter itself moves them by
  {proof["effect"]:.0%}. The most likely token is the same at {proof["top1_agreement"]:.1%} of the tokens."""
