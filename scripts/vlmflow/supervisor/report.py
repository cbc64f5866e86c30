"""Reports a training: steps, losses, speed, memory, versions, digests; and draws its loss curve."""

import importlib.metadata
import math
from pathlib import Path

from vlmflow.config.run_settings import experiments
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.in_trainer.events import Begin, End, Model, read_events
from vlmflow.in_trainer.history import logged
from vlmflow.supervisor.accounts import Best, EndedEarly, TrainingDigests, TrainingReport
from vlmflow.supervisor.newest import Newest
from vlmflow.supervisor.released import digests_of
from vlmflow.supervisor.step_plan import read_plan
from vlmflow.supervisor.train import Trained
from vlmflow.swift.arguments import Training

PACKAGES = ("torch", "ms-swift", "transformers", "peft", "accelerate")


def report(training: Training, trained: Trained) -> TrainingReport:
    """Return the machine-readable report of a finished training.

    Raises VlmflowError if its progress file is missing or empty, or has a line of another form.
    """
    events = read_events(trained.folder.progress)
    begins = [event for event in events if isinstance(event, Begin)]
    ends = [event for event in events if isinstance(event, End)]
    if not begins:
        raise VlmflowError(
            f"{trained.folder.progress}: no session begins in it",
            f"restore the file; or remove {trained.folder.path} and run the same command again: it trains from step 0",
        )
    models = [event for event in events if isinstance(event, Model)]
    newest = Newest.of(events)
    seconds, tokens = newest.seconds, newest.tokens
    state = trained.last.state
    best = Best(trained.best.step, math.nan if state.best_metric is None else state.best_metric)
    patience = training.settings.early_stop_after
    early = EndedEarly(patience, best.step, best.eval_loss) if patience and trained.last.ended_early(patience) else None
    evaluation = next(entry for entry in reversed(state.log_history) if "eval_loss" in entry)
    return TrainingReport(
        steps=trained.last.step,
        target=trained.last.target,
        ended_early=early,
        sessions=newest.sessions,
        world_size=begins[-1].world_size,
        parallel_mode=begins[-1].parallel_mode,
        device=begins[-1].device,
        seconds=round(seconds, 2),
        tokens=tokens,
        tokens_per_second=round(tokens / seconds, 1) if seconds else None,
        peak_memory=ends[-1].peak_memory if ends else [],
        layers=models[-1].layers if models else [],
        losses=logged(state.log_history, "loss"),
        eval_losses=logged(state.log_history, "eval_loss"),
        eval_rows=evaluation["eval_rows"],
        eval_tokens=evaluation["eval_tokens"],
        best=best,
        settings=training.settings.model_dump(mode="json"),
        tuner=training.tuner.name,
        strategy=training.strategy.name,
        deepspeed=training.strategy.deepspeed,
        plan=read_plan(trained.folder),
        experimental=experiments(training.tuner.name, training.strategy.name, training.settings),
        digests=TrainingDigests(
            job=training.digest(),
            data=training.data.digest,
            model=training.model.digest,
            released=digests_of(trained.best.folder, training.tuner),
            progress=sha256_of(trained.folder.progress),
        ),
        versions={package: importlib.metadata.version(package) for package in PACKAGES},
        run_folder=str(trained.folder.path),
    )


def draw_losses(report: TrainingReport, title: str, picture: Path) -> None:
    """Draw training and validation loss over the steps into a PNG file, and mark the best checkpoint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*(report.losses or []), strict=True), color="0.6", linewidth=1, label="train")
    if report.eval_losses:
        axes.plot(*zip(*report.eval_losses, strict=True), "o-", color="C0", label="val")
        axes.plot(report.best.step, report.best.eval_loss, "*", color="C3", markersize=14, label="best checkpoint")
    axes.set(title=title, xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
