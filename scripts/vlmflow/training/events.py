"""What a trainer tells while it trains: the lines of `progress.jsonl` in its run folder.

step: optimizer steps done. target: those of the whole run. tokens: those trained on since step 0, padding not counted.
"""

import json
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.core.errors import VlmflowError


class Begin(msgspec.Struct, frozen=True, tag_field="event", tag="begin"):
    """A session begins. world_size: trainers side by side. parallel_mode: as transformers has it. device: its name."""

    step: int
    target: int
    tokens: int
    world_size: int
    parallel_mode: str
    device: str


class Log(msgspec.Struct, frozen=True, tag_field="event", tag="log"):
    """A step was made, or an evaluation. time: seconds since the session began. Losses: nats per token, of what was."""

    time: float
    step: int
    target: int
    tokens: int
    loss: float | UnsetType = UNSET
    eval_loss: float | UnsetType = UNSET
    learning_rate: float | UnsetType = UNSET
    grad_norm: float | UnsetType = UNSET
    epoch: float | UnsetType = UNSET


class End(msgspec.Struct, frozen=True, tag_field="event", tag="end"):
    """A session ended by itself. peak_memory: bytes per process."""

    step: int
    peak_memory: list[int]


Event = Begin | Log | End


def as_line(event: Event) -> str:
    """Write an event as a line. A loss that is no number is NaN there, for which msgspec's own JSON has null."""
    return json.dumps(msgspec.to_builtins(event)) + "\n"


def read_event(line: bytes) -> Event:
    """Read a line; raises ValueError where it is no event."""
    return msgspec.convert(json.loads(line), Event)  # type: ignore[no-any-return]


def read_events(progress: Path) -> list[Event]:
    """Read a whole progress file.

    Raises VlmflowError with the line that is no event.
    """
    events = []
    for number, line in enumerate(progress.read_bytes().splitlines(), start=1):
        try:
            events.append(read_event(line))
        except ValueError as error:
            raise VlmflowError(
                f"{progress}, line {number}: {error}",
                f"another version of vlmflow may have written it: remove {progress.parent} and run the same command "
                "again: it trains from the first step",
            ) from None
    return events
