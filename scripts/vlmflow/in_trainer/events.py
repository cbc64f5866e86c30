"""Events of a trainer: the lines of `progress.jsonl` in its run folder.

step: optimizer steps done. target: those of the whole run. tokens: those trained on since step 0, without padding.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.model_layers import Layers


class Begin(msgspec.Struct, frozen=True, tag_field="event", tag="begin"):
    """A session begins. world_size: parallel trainers. parallel_mode: as in transformers. device: its name.

    at: when, in seconds since 1970, by rank 0's clock; missing in older files.
    """

    step: int
    target: int
    tokens: int
    world_size: int
    parallel_mode: str
    device: str
    at: float | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, tag_field="event", tag="model"):
    """The model of the session that just began. layers: of all kinds."""

    step: int
    layers: list[Layers]


class Log(msgspec.Struct, frozen=True, tag_field="event", tag="log"):
    """A step or an evaluation is done. time: seconds since the session began. Losses are in nats per token.

    Of rank 0, and missing in older files: waited: seconds of this session in which it waited for its next batch.
    memory: the most bytes so far, on the GPU, or on a machine without one in all.
    """

    time: float
    step: int
    target: int
    tokens: int
    loss: float | UnsetType = UNSET
    eval_loss: float | UnsetType = UNSET
    learning_rate: float | UnsetType = UNSET
    grad_norm: float | UnsetType = UNSET
    epoch: float | UnsetType = UNSET
    waited: float | UnsetType = UNSET
    memory: int | UnsetType = UNSET


class End(msgspec.Struct, frozen=True, tag_field="event", tag="end"):
    """A session ended by itself. peak_memory: bytes per process."""

    step: int
    peak_memory: list[int]


Event = Begin | Model | Log | End


def as_line(event: Event) -> str:
    """Format an event as a line. A loss that is not a number becomes NaN; msgspec's own JSON would write null."""
    return json.dumps(msgspec.to_builtins(event)) + "\n"


def read_event(line: bytes) -> Event:
    """Parse a line of UTF-8; raises ValueError if it is not an event."""
    try:
        return msgspec.convert(json.loads(line.decode()), Event)  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError("nested too deeply") from None


def new_events(lines: IO[bytes]) -> Iterator[Event]:
    """Yield the events of complete lines that were written since the last call with the same open progress file.

    A line that is not an event is left out, so that it ends no training; `read_events` names it.
    """
    while (line := lines.readline()).endswith(b"\n"):
        with suppress(ValueError):
            yield read_event(line)
    lines.seek(-len(line), os.SEEK_CUR)


def read_events(progress: Path) -> list[Event]:
    """Read a progress file; a last line without its end is left out, since a full disk or a kill cut it.

    A missing file has none. Raises VlmflowError with the first line that is not an event.
    """
    events = []
    *lines, _ = progress.read_bytes().split(b"\n") if progress.is_file() else [b""]
    for number, line in enumerate(lines, start=1):
        try:
            events.append(read_event(line))
        except ValueError as error:
            raise VlmflowError(
                f"{progress}, line {number}: {error}",
                f"remove line {number} of {progress} and run the same command again: the line's figures are lost, and "
                "nothing of the training",
            ) from None
    return events
