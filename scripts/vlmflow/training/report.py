"""What a training was: steps, losses, speed, memory, versions, digests; and its loss curve as a picture."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from vlmflow.swift.arguments import TrainJob
from vlmflow.training.checkpoint import adapter_digests
from vlmflow.training.train import Trained

PACKAGES = ("torch", "ms-swift", "transformers", "peft", "accelerate")


def report(job: TrainJob, trained: Trained) -> dict[str, Any]:
    """Give the machine-readable report of a finished training.

    seconds: time spent in training steps and evaluations over all sessions, without start-up.
    tokens: those trained on, padding not counted. peak_memory: bytes per process of the last session.
    """
    events = [json.loads(line) for line in trained.folder.progress.read_text().splitlines()]
    begins = [event for event in events if event["event"] == "begin"]
    ends = [event for event in events if event["event"] == "end"]
    seconds, tokens = _effort(events)
    history = trained.last.state["log_history"]
    return {
        "steps": trained.last.step,
        "target": trained.last.target,
        "ended_early": trained.last.ended_early(job.settings.early_stop_after),
        "sessions": len(begins),
        "world_size": begins[-1]["world_size"],
        "parallel_mode": begins[-1]["parallel_mode"],
        "device": begins[-1]["device"],
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "peak_memory": ends[-1]["peak_memory"] if ends else [],
        "losses": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "eval_losses": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
        "best": {"step": trained.best.step, "eval_loss": trained.last.state["best_metric"]},
        "settings": job.describe()["settings"],
        "strategy": job.strategy.name,
        "digests": {
            "job": job.digest(),
            "data": job.data.digest,
            "model": job.model.digest,
            **adapter_digests(trained.best.folder, trained.best.strategy.adapter),
        },
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "run_folder": str(trained.folder.path),
    }


def _effort(events: list[dict[str, Any]]) -> tuple[float, int]:
    """Sum seconds and tokens over sessions; what a kill cost is counted, since it was paid for."""
    seconds, tokens = 0.0, 0
    time_before, tokens_before = 0.0, 0
    for event in events:
        if event["event"] == "begin":
            time_before, tokens_before = 0.0, event["tokens"]
        elif event["event"] == "log":
            seconds += event["time"] - time_before
            tokens += event["tokens"] - tokens_before
            time_before, tokens_before = event["time"], event["tokens"]
    return seconds, tokens


def draw_losses(report: dict[str, Any], title: str, picture: Path) -> None:
    """Draw training and validation loss over the steps into a PNG file, the best checkpoint marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*report["losses"], strict=True), color="0.6", linewidth=1, label="train")
    if report["eval_losses"]:
        axes.plot(*zip(*report["eval_losses"], strict=True), "o-", color="C0", label="val")
        best = report["best"]
        axes.plot(best["step"], best["eval_loss"], "*", color="C3", markersize=14, label="best checkpoint")
    axes.set(title=title, xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
