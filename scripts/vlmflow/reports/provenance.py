"""The provenance of merged weights: digests of everything from the raw file to the weights, and the model card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.run_blocks import own_settings
from vlmflow.config.strategies import Tuner, tuner_of
from vlmflow.core.account import read_account
from vlmflow.evaluation.report import EvaluationReport, left_out_in_words
from vlmflow.evaluation.verdict import shown_shares
from vlmflow.fetch.placed import InFp8, ModelManifest
from vlmflow.merging.proof import WRITTEN_AFTERWARDS, LimitedFile, Proof
from vlmflow.reports.eval_figures import ShownFigures, losses_of, shown_figures
from vlmflow.reports.origin import BaseModelFiles, Fp8Files, Provenance, StatedLicences, hub_datasets
from vlmflow.reports.page import render
from vlmflow.reports.run_history import settings_of
from vlmflow.rows.sharegpt import in_words
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.report import Gate, TrainingReport


def provenance(
    run: str,
    stats: Path,
    manifest: ModelManifest,
    smoke: Path,
    trained: TrainingReport,
    proof: Proof,
    stated: StatedLicences,
    sees_pictures: bool,
    limited: LimitedFile | None,
    evaluations: dict[str, EvaluationReport],
    good_run: str | None = None,
    of_base: Provenance | None = None,
) -> Provenance:
    """Collect the provenance from the stages' accounts.

    stats: the data set's account. manifest: that of the base model. of_base: the provenance of a base that is the
    weights of another run. smoke: the folder of the short run.
    trained: the report of the full run. proof: that of verified/RUN. sees_pictures: whether the merged model has a
    processor for pictures. limited: the published file that differs from the proven one. evaluations: by split.
    good_run: a run that trains only good attempts of the same data.
    """
    data = read_account(stats, Stats)
    return Provenance(
        run=run,
        data=data,
        rights=stated,
        base_model=BaseModelFiles(
            source=manifest.source,
            revision=manifest.revision,
            digest=manifest.digest,
            files={name: record.sha256 for name, record in manifest.files.items()},
            left_out=manifest.left_out,
            provenance=of_base,
            dequantized_from=_digests_of(manifest.dequantized_from),
        ),
        smoke=read_account(smoke / "gate.json", Gate),
        training=msgspec.structs.replace(trained, losses=msgspec.UNSET),
        verification=proof.checks,
        sees_pictures=sees_pictures,
        merged={
            name: file.sha256
            for name, file in proof.files.items()
            if name not in WRITTEN_AFTERWARDS  # a base may have such files, which ours replace
        }
        | ({limited.file: limited.published} if limited else {}),
        picture_limits=limited,
        git_commit=proof.git_commit,
        versions=proof.versions,
        evaluations=evaluations,
        trained_text=in_words(data.trained_characters, data.scored, good_run),
    )


def _digests_of(in_fp8: InFp8 | msgspec.UnsetType) -> Fp8Files | msgspec.UnsetType:
    if in_fp8 is msgspec.UNSET:
        return msgspec.UNSET
    return Fp8Files(in_fp8.digest, {name: record.sha256 for name, record in in_fp8.files.items()})


@dataclass(frozen=True)
class ModelCard:
    """The card's facts. fitted: the numbers of training rows, for people. datasets: the hub's names of the data.

    trains_adapter: whether an adapter was trained, or the model's own weights. adapter: its kind, for people.
    quantises: whether the base was in 4 bit meanwhile. rows_per_step: of all processes together. tags: the hub's, for
    search. results: those of the evaluations, as the hub's metadata has them (`model-index`). shown: the figures
    of the evaluations by split. left_out: by split, the rows that are out, for people. settings: those that
    differ from the defaults.
    """

    facts: Provenance
    fitted: str
    datasets: list[str]
    trains_adapter: bool
    adapter: str
    quantises: bool
    rows_per_step: int
    tags: list[str]
    results: list[dict[str, Any]]
    shown: dict[str, list[ShownFigures]]
    left_out: dict[str, str]
    settings: list[tuple[str, str]]


def model_card(facts: Provenance) -> str:
    """Return the README.md of merged weights from their provenance, with the hub's metadata block on top."""
    fitted = ", ".join(f"{split.lengths.rows:,} {name}" for name, split in facts.smoke.fitted.items())
    tuner = tuner_of(facts.training.tuner)
    tags = ["vlmflow", *([tuner.name, "merged"] if tuner.trains_adapter else ["full-fine-tuning"])]
    card = ModelCard(
        facts,
        fitted,
        hub_datasets(*(one.rights for one in facts.rounds)),
        tuner.trains_adapter,
        _kind_of_adapter(facts.training.settings, tuner),
        tuner.quantises,
        _rows_per_step(facts.training),
        tags,
        hub_results(facts),
        {split: shown_figures(report) for split, report in facts.evaluations.items()},
        {split: left_out_in_words(report.left_out) for split, report in facts.evaluations.items()},
        own_settings(settings_of(facts.training)),
    )
    return render("card/card.md.jinja", card)


def hub_results(facts: Provenance) -> list[dict[str, Any]]:
    """Return the evaluations in the form of the hub's model cards (`model-index`, huggingface.co/docs/hub/model-cards).

    Each metric is of the tuned model: a share of rows, or a mean loss in nats per token. The hub shows neither the base
    nor intervals; the card's own tables have them.
    """
    hub_names = hub_datasets(facts.rights)
    task = "image-text-to-text" if facts.sees_pictures else "text-generation"
    return [
        {
            "task": {"type": task},
            "dataset": {
                "name": report.dataset,
                "type": hub_names[0] if hub_names else report.dataset,
                "split": {"val": "validation"}.get(split, split),
            },
            "metrics": [
                {"type": kind, "name": begin + name, "value": round(compared.tuned.mean, 6)}
                for kind, begin, some in (
                    ("share", "rows in which ", shown_shares(report.figures.all)),
                    ("loss", "", losses_of(report.figures.all)),
                )
                for name, compared in some
            ],
        }
        for split, report in facts.evaluations.items()
    ]


def _kind_of_adapter(settings: dict[str, Any], tuner: Tuner) -> str:
    lora = settings["lora"]
    kind = {(False, False): "LoRA", (True, False): "rsLoRA", (False, True): "DoRA", (True, True): "DoRA and rsLoRA"}
    return f"{'Q' if tuner.quantises else ''}{kind[lora['rslora'], lora['dora']]}"


def _rows_per_step(training: TrainingReport) -> int:
    """Return how many rows a step trains."""
    settings = training.settings
    data_parallel_ranks = training.world_size // settings["sequence_parallel"]
    return int(data_parallel_ranks * settings["per_device_batch_size"] * settings["gradient_accumulation_steps"])
