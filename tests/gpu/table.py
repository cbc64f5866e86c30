"""The figures of the check, for people."""

from collections.abc import Iterator
from typing import Any


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
