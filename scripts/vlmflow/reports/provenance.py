"""The provenance of merged weights: digests of everything from the raw file to the weights, and the model card."""

import json
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account
from vlmflow.fetch.model_folder import ModelManifest
from vlmflow.merging.proof import WRITTEN_AFTERWARDS, LogitProof, Proof, TensorProof
from vlmflow.reports.accounts import BaseModelFiles, Provenance
from vlmflow.reports.licences import StatedLicences, hub_datasets, licence_section
from vlmflow.rows.stats import Stats
from vlmflow.training.accounts import Gate, TrainingReport

FOLDER = "PATH OF THIS FOLDER"
QUESTIONS = {"image": "What is in the picture?", "text": "What is a picture?"}


def provenance(
    run: str,
    stats: Path,
    manifest: ModelManifest,
    smoke: Path,
    full: Path,
    proof: Proof,
    stated: StatedLicences,
    sees_pictures: bool,
) -> Provenance:
    """Collect the provenance from the stages' accounts.

    stats: the data set's account. manifest: that of the base model. smoke, full: the training's folders.
    sees_pictures: whether the merged model has a processor for pictures.
    """
    report = read_account(full / "report.json", TrainingReport)
    return Provenance(
        run=run,
        data=read_account(stats, Stats),
        rights=stated,
        base_model=BaseModelFiles(
            source=manifest.source,
            revision=manifest.revision,
            digest=manifest.digest,
            files={name: record.sha256 for name, record in manifest.files.items()},
            left_out=manifest.left_out,
        ),
        smoke=read_account(smoke / "gate.json", Gate),
        training=msgspec.structs.replace(report, losses=msgspec.UNSET),
        verification=proof.checks,
        sees_pictures=sees_pictures,
        merged={
            name: file.sha256
            for name, file in proof.files.items()
            if name not in WRITTEN_AFTERWARDS  # a base may have such files, which ours replace
        },
        git_commit=proof.git_commit,
        versions=proof.versions,
    )


def model_card(facts: Provenance) -> str:
    """Return the README.md of merged weights from their provenance, with the hub's metadata block on top."""
    data, training, base, verified = facts.data, facts.training, facts.base_model, facts.verification
    best = training.best
    counts = "\n".join(f"| {name} | {' | '.join(map(str, rows.went))} |" for name, rows in data.splits.items())
    proofs = [_tensors_in_words(verified.tensors), *([_logits_in_words(verified.logits)] if verified.logits else [])]
    checks = "\n".join(f"- {words}" for words in proofs)
    base_line = f"base_model: {json.dumps(base.source.removeprefix('hf://'))}\n" if base.revision else ""
    datasets = hub_datasets(facts.rights)
    data_line = f"datasets: {json.dumps(datasets)}\n" if datasets else ""
    return f"""---
library_name: transformers
{base_line}{data_line}tags: [vlmflow, lora, merged]
---
# {facts.run}

{base.source} with a LoRA adapter trained on the data set `{data.dataset}` ({data.made_of}), merged
into the weights and verified. `provenance.json` lists every digest.

## Data

| raw split | rows in | kept | rejected | left out |
|---|---:|---:|---:|---:|
{counts}

{_fitted_in_words(facts.smoke)} The test split ({data.examples["test"]:,}) was not used.

## Rights

{licence_section(facts.rights)}

## Training

{training.steps} optimizer steps{_ended_early(training)} on {training.world_size} process(es)
({training.device}, {training.strategy}), {training.tokens:,} tokens in {training.seconds:,} s. The
adapter is from step {best.step}, which has the lowest validation loss: {best.eval_loss:.4f}.

## Verification

{checks}

## Use

```python
{how_to_ask(facts.sees_pictures, data.modality)}
```
"""


def how_to_ask(sees_pictures: bool, modality: str) -> str:
    """Return lines of Python that ask the merged model a question.

    sees_pictures: whether it has a processor for pictures. modality: that of its training rows.
    """
    if sees_pictures:
        name, reader, auto = "processor", "AutoProcessor", "AutoModelForImageTextToText"
        picture = '{"type": "image", "path": "PICTURE"}, ' if modality == "image" else ""
        content = f'[{picture}{{"type": "text", "text": "{QUESTIONS[modality]}"}}]'
    else:
        name, reader, auto = "tokenizer", "AutoTokenizer", "AutoModelForCausalLM"
        content = f'"{QUESTIONS[modality]}"'
    return f"""from transformers import {auto}, {reader}

{name} = {reader}.from_pretrained("{FOLDER}")
model = {auto}.from_pretrained("{FOLDER}", dtype="auto", device_map="auto")
content = {content}
inputs = {name}.apply_chat_template(
    [{{"role": "user", "content": content}}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
).to(model.device)
answer = model.generate(**inputs, max_new_tokens=200)[0, inputs["input_ids"].shape[1] :]
print({name}.decode(answer, skip_special_tokens=True))"""


def _ended_early(training: TrainingReport) -> str:
    if not training.ended_early:
        return ""
    return f" of {training.target} (ended early, by validation loss)"


def _fitted_in_words(gate: Gate) -> str:
    rows = [f"{split.lengths.rows:,} {name}" for name, split in gate.fitted.items()]
    lengths = gate.lengths
    pictures = f", {lengths.picture_share:.0%}\nof them for pictures" if lengths.picture_share else ""
    return f"""Training rows: {", ".join(rows)}; of the over-long ones {gate.left_out:,} were left out,
{gate.shortened:,} shortened by their oldest attempts. The train rows have {lengths.tokens:,} tokens{pictures};
the median row has {lengths.median:,}, the longest {lengths.longest[0].tokens:,}."""


def _tensors_in_words(proof: TensorProof) -> str:
    return f"""Tensors: {proof.touched} of {proof.tensors} carry the adapter; each equals W + s · BA within
  {proof.largest_deviation:.2f} units of the last stored bit (rounding alone reaches 0.5). The other
  {proof.untouched} are the base model's, byte for byte."""


def _logits_in_words(proof: LogitProof) -> str:
    return f"""Logits on {proof.rows} rows of the val split ({proof.positions:,} tokens, {proof.dtype},
  {proof.device}): base + adapter in peft and the merged weights differ by {proof.deviation:.2%} of the logits'
  spread (rounding explains up to {proof.allowed_deviation:.2%}); the adapter itself moves them by
  {proof.effect:.0%}. The most likely token is the same at {proof.top1_agreement:.1%} of the
  tokens.{_verdict(proof)}"""


def _verdict(proof: LogitProof) -> str:
    if proof.verdict != "inconclusive":
        return ""
    return f"""
  This comparison is **inconclusive**: rounding hides part of so small an update. Even a correct merge, such as
  peft's, shows only {proof.effect_rounded:.2f} times the adapter's effect; these weights show
  {proof.effect_found:.2f}. Only the tensors prove that the merge is right."""
