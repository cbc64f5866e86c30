"""Publish proven weights under their own name, with model card and provenance."""

from pathlib import Path

import msgspec

from vlmflow.config.after_training import ChosenBy, Requirements
from vlmflow.config.settings import Settings
from vlmflow.core.account import read_account, refuse_other_rows, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import FOLDER_MARK, read_json, remove, whole_folder
from vlmflow.evaluation.verdict import read_evaluations, refuse_unless_shown
from vlmflow.fetch.chat_templates import stop_tokens_of
from vlmflow.fetch.placed import PROVENANCE, ModelManifest, digest_of_files, read_model_manifest
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.summary import ACCOUNT, fitted_rows
from vlmflow.merging.proof import PROOF, publish_limits, read_proof, take_over
from vlmflow.reports.card import model_card
from vlmflow.reports.licences import stated_licences
from vlmflow.reports.provenance import BaseModelFiles, Provenance, published_files
from vlmflow.rows.sharegpt import in_words
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.report import Gate, TrainingReport


class RunBlock(Settings):
    """The settings of the run and of its data set that this stage uses; see docs/config.md."""

    all_addresses: list[str]
    """Its sources."""

    licence: str | None
    source_licences: dict[str, str]

    require: Requirements
    """What the evaluation on val must show."""

    chosen_by: ChosenBy | None


def main(
    *,
    verified: Path,
    full: Path,
    smoke: Path,
    model: Path,
    rows: Path,
    stats: Path,
    published: Path,
    settings: RunBlock,
    picture_licences: dict[str, str],
    evaluations: list[Path] | None = None,
    good_run: str | None = None,
) -> None:
    """Publish one run's proven weights.

    verified: the proven folder (verified/RUN), whose files `published` (merged/RUN) shares by hard links, all but the
    file with the picture limits.
    full, smoke: the training's folders. model: folder with the base model's manifest.
    rows: the run's rows that fit (fitted/RUN). stats: the data set's account.
    settings: those of the run. evaluations: the folders eval/RUN/SPLIT of an evaluated run.
    picture_licences: the licences of picture sources, by the beginnings of the pictures' paths. good_run: a run that
    trains only good attempts of the same data.
    """
    refuse_other_rows(rows / ACCOUNT)
    base, proof = read_model_manifest(model), read_proof(verified)
    evaluated = read_evaluations(evaluations or [], proof)
    refuse_unless_shown(evaluated, settings.require)
    data, trained = read_account(stats, Stats), read_account(full / "report.json", TrainingReport)
    addresses, licence, of_sources = settings.all_addresses, settings.licence, settings.source_licences
    rights = stated_licences(data.dataset, addresses, licence, of_sources, picture_licences, rows / "train.jsonl")
    with whole_folder(published) as folder:
        take_over(verified, folder)
        for ours in (PROOF, FOLDER_MARK, "README.md"):  # the base's README is not this model's card
            remove(folder / ours)
        limited = publish_limits(folder, trained.settings["image_max_tokens"])
        facts = Provenance(
            run=published.name,
            data=data,
            rights=rights,
            base_model=BaseModelFiles.of(base, provenance_of(model, base)),
            smoke=read_account(smoke / "gate.json", Gate),
            training=msgspec.structs.replace(trained, losses=msgspec.UNSET),
            verification=proof.checks,
            sees_pictures="vision_config" in read_json(folder / "config.json"),
            merged=published_files(proof, limited),
            picture_limits=limited,
            git_commit=proof.git_commit,
            versions=proof.versions,
            evaluations=evaluated,
            chosen_by=settings.chosen_by.in_words() if settings.chosen_by else None,
            trained_text=in_words(data.trained_characters, data.scored, good_run),
            chat_template=fitted_rows(rows).chat_template,
            stop_tokens=stop_tokens_of(folder),
        )
        write_account(folder / PROVENANCE, facts)
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")


def provenance_of(model: Path, base: ModelManifest) -> Provenance | None:
    """Return the provenance of a base that is the weights of another run; None for any other base.

    Raises VlmflowError if it is that of other weights.
    """
    if not (model / PROVENANCE).is_file():
        return None
    facts = read_account(model / PROVENANCE, Provenance)
    if digest_of_files(facts.merged) != base.digest:
        raise VlmflowError(
            f"{model / PROVENANCE}: it is of other weights than {base.folder}",
            f"remove {model} and run the same command again: the workflow takes both from {base.source}",
        )
    return facts


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
