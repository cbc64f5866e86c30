"""The accounts of a data set and of a run's later stages, for tests that read them and train nothing."""

from pathlib import Path
from typing import Any

from vlmflow.config.data_settings import RowLimits
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import strategy_of
from vlmflow.core.account import write_account
from vlmflow.evaluation.report import (
    AfterRounds,
    AnswerReport,
    AskedModel,
    Change,
    Choice,
    Compared,
    EvaluatedModel,
    EvaluationReport,
    Interval,
    MarginFigures,
    MarginReport,
    ModelAnswer,
    ModelFigures,
)
from vlmflow.evaluation.scoring.stated import Overlap
from vlmflow.in_trainer.messages import Event, as_line
from vlmflow.lengths.summary import FittedRows, FittedSplit, NamedRow, SplitLengths
from vlmflow.merging.proof import Checks, LogitProof, TensorProof
from vlmflow.pictures.manifest import PictureCounts
from vlmflow.reports.former_trainings import MadeOf
from vlmflow.reports.licences import StatedLicences
from vlmflow.reports.provenance import BaseModelFiles, Provenance
from vlmflow.rows.stats import RulesUsed, SplitCounts, Stats
from vlmflow.rows.strict_rows import Found
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.report import Best, FullRun, Gate, PlannedMerge, TrainingDigests, TrainingReport, digests_of
from vlmflow.swift.arguments import BaseModel, Training


def some_stats(**fields: Any) -> Stats:
    """Return the account of the data set `fire` with one raw row. fields: those that differ."""
    used = RulesUsed(
        max_history_rounds=None,
        val_share=0.1,
        seed=1,
        max_reject_share=0.5,
        row_limits=RowLimits().model_dump(),
        test_share=0.0,
    )
    usual: dict[str, Any] = {
        "dataset": "fire",
        "kind": "fire",
        "modality": "image",
        "skip_images": False,
        "form": "trajectory",
        "mended": [],
        "settings": used,
        "train": SplitCounts(1, 1, {}),
        "examples": {"train": 1, "val": 0, "test": 0},
        "kept_by_source": {"train": {"": 1}},
        "kept_by_attempts": {"train": {1: 1}},
        "mended_rows": {"train": 0},
        "score_field_differs": {"train": 0},
        "pictures": {"train": PictureCounts()},
        "unread": {"train": Found().counts(())},
        "digests": {},
        "raw": {"train": []},
    }
    return Stats(**(usual | fields))


MADE_OF = MadeOf("hf://Qwen/Qwen3-8B", "fire", [("train.learning_rate", "0.0002")])
LENGTHS = SplitLengths(9, 1_000, 1_000, 0, 10, 20, [NamedRow("row-1", 20, 0)])
MERGE = PlannedMerge(9, 4, {"q_proj": 4}, 0.9, False)


def some_report(**fields: Any) -> TrainingReport:
    """Give the report of a training of eight steps on four processes; fields: those that differ."""
    usual: dict[str, Any] = {
        "steps": 8,
        "target": 8,
        "ended_early": None,
        "sessions": 1,
        "world_size": 4,
        "parallel_mode": "DISTRIBUTED",
        "device": "cpu",
        "seconds": 50.0,
        "tokens": 4_000,
        "tokens_per_second": 80.0,
        "peak_memory": [2_000_000],
        "losses": [(step, 4.0 - step / 4) for step in range(1, 9)],
        "eval_losses": [(4, 3.0), (8, 2.0)],
        "eval_rows": 9,
        "eval_tokens": 90,
        "best": Best(8, 2.0),
        "settings": TrainSettings().on_device("cpu", 4).model_dump(mode="json"),
        "tuner": "lora",
        "strategy": "ddp",
        "experimental": [],
        "layers": [],
        "digests": TrainingDigests("job", "data", "model", {"adapter_model.safetensors": "adapter"}, "progress"),
        "versions": {},
        "run_folder": "stores/runs/mine/full/job",
    }
    return TrainingReport(**(usual | fields))


def leave_training(stage: Path, name: str, events: list[Event], **train: Any) -> Path:
    """Leave the run folder of a training like that of `some_report`. stage: its place. train: settings that differ."""
    folder = stage / name
    job = {"nodes": 1, "processes": 4, "device": "cpu", "tuner": "lora", "strategy": "ddp", "deepspeed": None}
    job |= {"data": {"digest": "data"}, "model": {"digest": "model"}}
    write_account(
        folder / "job.json",
        job | {"settings": TrainSettings(**train).on_device("cpu", 4).scheduled(8).model_dump(mode="json")},
    )
    (folder / "progress.jsonl").write_text("".join(map(as_line, events)))
    return folder


def report_of(adapter: Path) -> TrainingReport:
    """Return the report of a training that left this adapter, as the merge requires it beside it."""
    return some_report(digests=TrainingDigests("job", "data", "model", digests_of(adapter), "progress"))


TRAINING_DATA = TrainingData(Path("d/train.jsonl"), Path("d/val.jsonl"), Path("pictures/fire"), "data-digest", False)


def some_training(
    device: str = "cuda", processes: int = 4, strategy: str = "ddp", data: Any = TRAINING_DATA, **settings: Any
) -> Training:
    """Return a training with nothing of its own. settings: those of `train`."""
    model = BaseModel(Path("/models/m"), "qwen3_vl", "model-digest")
    return Training(data, model, TrainSettings(**settings), device, processes, strategy_of(strategy))


def some_gate() -> Gate:
    """Give the open gate of a run with nine rows to train on."""
    return Gate(
        passed=True,
        checks=[],
        peak_memory=[2_000_000],
        tokens_per_second=80.0,
        lengths=LENGTHS,
        full_run=FullRun(8, [], 4_000, 100, 7_200, "2 h"),
        fitted={"train": FittedSplit(9, 0, 0, LENGTHS)},
        merge=MERGE,
    )


def some_fitted() -> FittedRows:
    """Give the account of a run's rows: nine in train and in val, two left out of each."""
    split = FittedSplit(11, 0, 2, LENGTHS)
    return FittedRows("fire", "trajectory", 512, split, split, {})


def some_checks(logits: LogitProof | None = None) -> Checks:
    """Give what the checks of a good merge found."""
    return Checks(TensorProof(1, 9, 4, 5, 0.5, 0.5, "q_proj.weight", []), logits)


def some_provenance(**fields: Any) -> Provenance:
    """Give the provenance of a run that was trained on the rows of `some_stats`; fields: those that differ."""
    usual: dict[str, Any] = {
        "run": "mine",
        "data": some_stats(),
        "rights": StatedLicences("fire", [], "unknown", [], []),
        "base_model": BaseModelFiles("hf://Qwen/Qwen3-8B", "abc", "digest", {}, []),
        "smoke": some_gate(),
        "training": some_report(),
        "verification": some_checks(),
        "sees_pictures": False,
        "merged": {},
        "git_commit": None,
        "versions": {},
    }
    return Provenance(**(usual | fields))


def compared(base: float, tuned: float, width: float | None = 0.04, rows: int = 400) -> Compared:
    """Return a share or a loss in both models. width: half of each interval; None: without intervals."""

    def interval(mean: float) -> Interval:
        return Interval(mean, *((None, None) if width is None else (mean - width, mean + width)))

    return Compared(rows, 300, 90, interval(base), interval(tuned), interval(tuned - base))


def some_figures(**fields: Any) -> MarginFigures:
    """Return the figures of 400 rows whose run learned to use feedback; fields: those that differ."""
    rows = fields.get("rows", 400)
    usual: dict[str, Any] = {
        "rows": 400,
        "groups": 300,
        "right_first": compared(0.5, 0.48),
        "right_with_feedback": compared(0.625, 0.75),
        "uses_feedback": compared(0.5, 0.75),
        "sees": compared(0.8, 0.81),
        "losses": {
            "question": compared(2.5, 2.0, rows=rows),
            "own": compared(2.0, 1.0, rows=rows),
            "other": compared(2.25, 1.6, rows=rows),
            "other_picture": compared(2.1, 1.9, rows=rows),
        },
    }
    return MarginFigures(**(usual | fields))


def answers_alone(**fields: Any) -> MarginFigures:
    """Return the figures of 400 rows without feedback and pictures, whose run answers better; fields: likewise."""
    no_shares = dict.fromkeys(("right_first", "right_with_feedback", "uses_feedback", "sees"))
    return some_figures(**(no_shares | {"losses": {"question": compared(2.0, 1.9)}} | fields))


def some_evaluation(**fields: Any) -> EvaluationReport:
    """Return the report of an evaluation on val; fields: those that differ."""
    usual: dict[str, Any] = {
        "run": "mine",
        "dataset": "fire",
        "split": "val",
        "verdict": "learned",
        "costs_first_answers": False,
        "sentence": "The tuned model learned to use feedback.",
        "rows": 400,
        "groups": 300,
        "left_out": {"no_feedback": 2},
        "feedback": True,
        "figures": MarginReport(some_figures(), some_figures(rows=365), {"gqa": some_figures()}),
        "looks": None,
        "rows_digest": "rows",
        "base": EvaluatedModel("base"),
        "tuned": EvaluatedModel("tuned"),
        "seed": 42,
        "dtype": "bfloat16",
        "device": "cuda",
        "image_max_tokens": 1024,
        "max_length": 8192,
        "versions": {},
    }
    return EvaluationReport(**(usual | fields))


def some_choice(**fields: Any) -> Choice:
    """Return the account of rows of val that can judge: 150 rows, which are enough."""
    usual = {"run": "mine", "dataset": "fire", "split": "val", "rows_digest": "digest", "feedback": True, "rows": 150}
    counts = {"groups": 130, "groups_without_echo": 120, "all_groups": 140, "left_out": {"no_wrong": 3}}
    return Choice(**(usual | counts | fields))


def an_answer(text: str, *, right: bool) -> ModelAnswer:
    """Return a model's answer that all scores call right, or wrong."""
    score = float(right)
    return ModelAnswer(
        text=text,
        answer=text,
        cut=False,
        right=right,
        exact_match=right,
        token_f1=score,
        anls=score,
        relaxed_accuracy=right,
    )


def some_answers() -> AnswerReport:
    """Return the report of answers on val at first and after one round of feedback."""
    mean = Interval(0.4, 0.3, 0.5)
    at_first = ModelFigures(mean, 0.4, 0.4, mean, 0.4, 5.0, 0, None, None)
    after = ModelFigures(mean, 0.4, 0.4, mean, 0.4, 5.0, 0, Change(9, 6, mean), Change(6, 0, mean))
    model = AskedModel("digest", Overlap(30, [0.5, 0.4, 0.3, 0.2], 1.0))
    rounds = [AfterRounds(k, 15, 15, one, one, mean, mean) for k, one in enumerate([at_first, after])]
    return AnswerReport(
        run="mine",
        dataset="fire",
        split="val",
        rows=15,
        groups=15,
        left_out={},
        feedback=True,
        gold_from_raw=15,
        holds_gold=0.25,
        all=rounds,
        without_gold=rounds,
        with_gold=None,
        sources={},
        rules={},
        looks=None,
        rows_digest="rows",
        base=model,
        tuned=model,
        server="transformers serve",
        picture_limits="4 to 64 tokens",
        not_applied=[],
        max_tokens=512,
        dtype="float32",
        device="cpu",
        seed=42,
        versions={},
    )
