"""Two trials of a search, trained for real, and compared on the half of val that chose neither."""

from dataclasses import replace
from pathlib import Path

import msgspec

from made_cases import row
from made_stats import some_stats
from tiny_models import file_names
from tiny_trainings import Tiny
from vlmflow.config.search_settings import trained_with
from vlmflow.core.account import write_account
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.chosen_split import SplitFiles
from vlmflow.fetch.placed import MANIFEST, FileRecord, ModelManifest, digest_of
from vlmflow.rows.holdout import group_of, half_of
from vlmflow.search.best import decisive
from vlmflow.search.judge import FOLDER, Judgement, compared
from vlmflow.supervisor.train import Trained, train
from vlmflow.swift.arguments import Training

ROWS, MEASURED = 210, 40
"""Rows of val, and how many are drawn from the half that judges."""

OWN, BEST = 1e-7, 1e-2
"""Learning rates: with the first the model stays as it was."""


def test_the_best_trial_is_compared_with_the_runs_own_settings_on_rows_that_chose_neither(tmp_path: Path) -> None:
    tiny = Tiny.write(tmp_path, vision=False)
    rows = [row(number, ("red", "green", "blue")[number % 3]) for number in range(ROWS)]
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in rows)
    val, stats, model = tmp_path / "data" / "val.jsonl", tmp_path / "data" / "stats.json", tmp_path / "model"
    val.parent.mkdir()
    val.write_bytes(lines)
    (tmp_path / "train.jsonl").write_bytes(lines)
    write_account(stats, some_stats(kind="alpaca", digests={val.name: sha256_of(val)}))
    base = tmp_path / "base"
    files = {name: FileRecord((base / name).stat().st_size, sha256_of(base / name)) for name in file_names(base)}
    write_account(model / MANIFEST, ModelManifest("tiny", str(base), None, base, files, [], digest_of(files)))

    def trial(rate: float) -> tuple[Trained, Training]:
        training = tiny.training(max_steps=4, checkpoint_steps=4, evaluation_steps=4)
        own = replace(training, settings=trained_with(training.settings, {"learning_rate": rate}))
        return train(own, tmp_path / "runs", 1, "a trial"), own

    how = Judgement("r", SplitFiles(val, stats, tmp_path), MEASURED, True, tmp_path / "evaluations", 1, halved=True)
    own, best = trial(OWN), trial(BEST)
    figures, chose_nothing = compared(own, best, model, how)

    judges = half_of((group_of(each, {}) for each in rows), "judges")
    assert judges is not None
    wanted = how.chosen(own[1], "judges")[0].rows
    assert {each.case.group for each in wanted} < judges
    assert not {each.case.group for each in how.chosen(own[1], "chooses")[0].rows} & judges
    kept = [line for file in (tmp_path / "evaluations").rglob("*.jsonl") for line in file.read_bytes().splitlines()]
    assert {msgspec.json.decode(line)["key"] for line in kept} == {each.work.key for each in wanted}
    assert chose_nothing
    assert figures.rows == MEASURED
    lost = decisive("eval_loss", figures)
    assert lost.difference.mean < -0.1, "the first model learned nothing, the other how answers begin"
    assert figures.uses_feedback is not None
    for trained, _ in (own, best):
        assert not (trained.folder.path / FOLDER).exists(), "the merged weights go"
