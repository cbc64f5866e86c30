"""Choose the rows on which a run is compared with its base, and their controls, before it is trained."""

from pathlib import Path

from vlmflow.config.after_training import Requirements
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import PartOf
from vlmflow.core.account import write_account
from vlmflow.core.errors import counted, log
from vlmflow.core.files import whole_folder
from vlmflow.evaluation.chosen_split import SplitFiles, candidates_of, choice_of, trained_on
from vlmflow.evaluation.measure import write_lines
from vlmflow.evaluation.report import CHOICE
from vlmflow.evaluation.verdict import refuse_too_few
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.summary import fitted_rows


def main(
    *,
    rows: Path,
    stats: Path,
    fitted: Path,
    chosen: Path,
    settings: PartOf[FlatRun],
    picture_store: Path,
    require: Requirements = None,
    pictures: list[Path] | None = None,
    raw_train: list[Path] | None = None,
    raw_val: list[Path] | None = None,
    raw_test: list[Path] | None = None,
    fixed_rows: list[Path] | None = None,
    bases: list[Path] | None = None,
    base_pictures: list[Path] | None = None,
) -> None:
    """Choose the rows of one split.

    rows: the split of the data set (data/DATASET/val.jsonl or test.jsonl). stats: the data set's account. fitted: the
    run's rows (fitted/RUN). chosen: the folder to make (chosen/RUN/SPLIT): rows.jsonl, left_out.jsonl and account.json.
    settings: those of the run. picture_store: the folder with all picture stores. require: what val must show
    (runs.NAME.evaluate.require). pictures: the image manifests of the data set; none if rows have no pictures.
    raw_train, raw_val, raw_test, fixed_rows: the raw files and those of edited rows, if raw rows have gold answers.
    bases: the rows of the runs from whose weights this one is trained (fitted/RUN). base_pictures: their image
    manifests.
    """
    run, split = chosen.parent.name, chosen.name
    raw = {"train": raw_train or [], "val": raw_val or [], "test": raw_test or []}
    files = SplitFiles(rows, stats, picture_store, pictures or [], raw, fixed_rows or [])
    trained = frozenset().union(*(trained_on(base, base_pictures or []) for base in bases or []))
    candidates = candidates_of(files, feedback=settings.feedback, seed=settings.seed, trained=trained)
    choice = choice_of(run, files, candidates, halved=split == "val" and fitted_rows(fitted).halved)
    if split == "val":
        refuse_too_few(choice, require)
    with whole_folder(chosen) as folder:
        write_lines(folder / "rows.jsonl", candidates.lines)
        write_lines(folder / "left_out.jsonl", candidates.out)
        write_account(folder / CHOICE, choice)
    log.info(f"{run}, {split}: {counted(choice.rows, 'row')} of {choice.groups:,} pictures or questions can judge")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
