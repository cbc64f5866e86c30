"""The parts of the check, in their order, how the minutes are shared among them, and their figures, for people."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpu import trainings
from gpu.road import STRATEGIES, Road

NO_TIME, NO_GPU = "not run: no time left", "not run: needs a GPU"
NO_FLASH = "not run: flash-attn is not installed"
TOO_LARGE = "not run: all weights of 8B, trained, need 140 GB; take SHAPE=2b"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One part. share: of all minutes, the most that it may take. needs: why it is not run here; None if it is.

    run: takes its limit in seconds, and returns its figures, of which `status` and `seconds` are always there.
    """

    name: str
    share: float
    run: Callable[[float], Figures]
    needs: str | None = None


def in_time(parts: Sequence[Part], seconds: float) -> Iterator[tuple[str, Figures]]:
    """Run the parts one by one, and yield the name and the figures of each.

    A part is not run if its share is more than what is left of the seconds. What one of them raises is its status.
    """
    over = time.monotonic() + seconds
    for part in parts:
        begun = time.monotonic()
        limit = part.share * seconds
        if part.needs is not None:
            yield part.name, {"status": part.needs, "seconds": 0.0}
        elif limit > over - begun:
            yield part.name, {"status": NO_TIME, "seconds": 0.0}
        else:
            try:
                figures = part.run(limit)
            except Exception as error:  # whatever a part lacks, the others are measured
                status = f"failed: {type(error).__name__}: {error}"
                figures = {"status": status, "seconds": round(time.monotonic() - begun, 1)}
            yield part.name, figures


def parts_of(road: Road, card: str | None) -> list[Part]:
    """Return all parts, the most telling first; later ones need what the first two make. card: the GPU's name."""
    gpu = None if road.device == "cuda" else NO_GPU
    flash = None if importlib.util.find_spec("flash_attn") else NO_FLASH

    def of_plan(rows: int) -> Part:
        name = f"plan-{rows}-rows"
        train = same | road.train(rows)
        return Part(name, 0.12, lambda limit: trainings.trained(road, name, train, limit))

    def of_rows(name: str, each: int, **train: object) -> Part:
        block = _in_batches(same | road.train(32), each) | train
        return Part(name, 0.12, lambda limit: trainings.trained(road, name, block, limit))

    def of_swift(name: str, each: int, needs: str | None, **arguments: object) -> Part:
        block = _in_batches(same | road.train(32), each)
        return Part(name, 0.12, lambda limit: trainings.bare(road, name, block, limit, **arguments), needs)

    def of_smoke(name: str, share: float, needs: str | None) -> Part:
        return Part(name, share, lambda limit: road.snakemake(name, limit, f"checkpoints/{name}/smoke"), needs)

    same = {"gradient_checkpointing": True}
    return [
        Part("model", 0.15, lambda limit: road.prepare(limit, card).figures),
        Part(
            "road",
            0.45,
            lambda limit: road.snakemake("road", limit, "fitted/passes", "merged/road", "reports/run-road.html"),
        ),
        of_rows("one-row-each", 1),
        of_rows("batch-8", 8),
        of_rows("batch-8-by-length", 8, group_by_length=True),
        of_swift("swift-padding-free", 8, flash or gpu, padding_free="true", attn_impl="flash_attention_2"),
        *(of_plan(rows) for rows in (32, 16, 8)),
        Part("passes", 0.2, lambda limit: trainings.passes(road, limit)),
        of_swift("swift", 1, None),
        of_smoke("full", 0.2, TOO_LARGE if road.shape == "8b" else None),
        of_smoke("qlora", 0.2, None),
        *(of_smoke(strategy, 0.25, gpu) for strategy in STRATEGIES),
        Part(
            "evaluation",
            0.2,
            lambda limit: road.snakemake("evaluation", limit, "eval/road/val", also=("evaluate.yaml",)),
        ),
        Part("resumed", 0.2, lambda limit: trainings.resumed(road, "resumed", same | road.train(16), limit)),
    ]


def _in_batches(train: dict[str, Any], each: int) -> dict[str, Any]:
    """Return the settings with so many rows in a pass, and as many rows in a step as before."""
    rows = train["rows_per_step"]
    batch = {"per_device_batch_size": min(each, rows), "gradient_accumulation_steps": max(1, rows // each)}
    return {key: value for key, value in train.items() if key != "rows_per_step"} | batch | {"micro_batch_tokens": None}


def table(figures: dict[str, Any]) -> str:
    """Return the lines of `gpu-check.json`: the machine, each part, and what it measured."""
    machine, parts = figures["machine"], figures["parts"]
    versions = " · ".join(f"{name} {version}" for name, version in machine["versions"].items())
    card = f"{machine['card']}, driver {machine['driver']}" if machine["card"] else "no GPU"
    lines = [
        f"{card}; {machine['cores']} cores; commit {machine['commit']}; Python {machine['python']}",
        versions,
        f"a random Qwen3-VL of shape {figures['shape']}, within {figures['minutes']:g} minutes",
        "",
        *(f"{name:<22}{part['seconds']:>7.1f} s  {part['status']}" for name, part in parts.items()),
    ]
    for name, part in parts.items():
        lines += [f"{name}: {line}" for line in part.get("log", [])]
    for title, rows in (
        ("seconds of each stage", _stages(parts)),
        ("trainings: real tokens/s; s a step; GB at most; loss after so many rows", _trainings(parts)),
        ("a pass: tokens; seconds; tokens/s", _passes(parts)),
        ("estimate and measurement", _estimates(parts)),
        ("after SIGTERM", _resumed(parts)),
    ):
        rows = list(rows)
        lines += ["", title, *(f"  {row}" for row in rows)] if rows else []
    return "\n".join(lines)


def _stages(parts: dict[str, Any]) -> Iterator[str]:
    for part in parts.values():
        for stage, seconds in part.get("stages", {}).items():
            yield f"{stage:<40}{seconds:>8.1f}"


def _trainings(parts: dict[str, Any]) -> Iterator[str]:
    for name, part in parts.items():
        if part.get("measured_steps"):
            memory = f"{part['memory'] / 1e9:.1f}" if part["memory"] else "?"
            losses = part["losses"]
            shown = [losses[0], losses[len(losses) // 2], losses[-1]]
            loss = ", ".join(f"{loss:.3f} ({rows})" for rows, loss in dict(shown).items())
            yield f"{name:<22}{part['tokens_per_second']:>9,.0f}{part['step_seconds']:>8.2f}{memory:>7}  {loss}"


def _passes(parts: dict[str, Any]) -> Iterator[str]:
    for one in parts.get("passes", {}).get("passes", []):
        yield f"{one['tokens']:>7,}{one['seconds']:>8.3f}{one['tokens'] / one['seconds']:>9,.0f}"


def _estimates(parts: dict[str, Any]) -> Iterator[str]:
    for name, part in parts.items():
        for one in part.get("estimate", []):
            if one["error"] is not None:
                yield (
                    f"{name + ': ' + one['name']:<40}{one['estimated']:>12.4g} estimated {one['measured']:>12.4g} "
                    f"measured {one['unit']}: {one['error']:+.0%}"
                )


def _resumed(parts: dict[str, Any]) -> Iterator[str]:
    part = parts.get("resumed", {})
    if "stopped_at" in part:
        yield f"saved and ended in {part['saving_seconds']:.1f} s at step {part['stopped_at']}; then: {part['status']}"
        whole = dict(parts.get("plan-16-rows", {}).get("losses", []))
        differences = [abs(loss - whole[rows]) for rows, loss in part["losses"] if rows in whole]
        if differences:
            yield f"losses differ from those of plan-16-rows by at most {max(differences):.2g}"
