"""What is sent to trackers, and the account of what they got (`tracked/RUN.json`)."""

from typing import Any

import msgspec


class Point(msgspec.Struct, frozen=True):
    """A figure of a step. seconds: since the training began, without pauses between its sessions."""

    key: str
    step: int
    value: float
    seconds: float


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """A run as trackers show it.

    digest: identifies the run: SHA-256 of its name and its training's digest. content: SHA-256 of everything below.
    ended: when its training ended, in seconds since 1970. seconds: how long it trained.
    settings: the run's settings, flat. facts: digests, versions and verdicts, as texts. points: the figures of steps.
    results: figures of the whole run. evaluated: those of its evaluations, which may come later.
    """

    run: str
    digest: str
    content: str
    ended: float
    seconds: float
    settings: dict[str, Any]
    facts: dict[str, str]
    points: list[Point]
    results: dict[str, float]
    evaluated: dict[str, float]


class Turn(msgspec.Struct, frozen=True):
    """What a model was asked in a row, and what it answered; or the gold answer, of which it gave the loss.

    name: "gold answer", or "after 1 round(s)". answer: what the model said; null if it was not asked. scores: by name;
    losses and margins are in nats per token.
    """

    name: str
    prompt: str
    answer: str | None
    scores: dict[str, float]
    facts: dict[str, str]


class RowTrace(msgspec.Struct, frozen=True):
    """One row and one model. identity: it is the same at every sending: run, split, row and model.

    model: "base" or "tuned". pictures: their SHA-256 digests, in the row's order. at: when the training ended, in
    seconds since 1970: reports of evaluations have no time, so that equal ones are equal files.
    """

    identity: str
    run: str
    split: str
    row: str
    source: str
    model: str
    pictures: list[str]
    at: float
    turns: list[Turn]


class Sent(msgspec.Struct, frozen=True):
    """What a tracker has of a run. where: address, project or folder. name: the run's name there.

    new: whether it was sent now; otherwise the tracker had it. figures: steps' figures, or spans.
    """

    where: str
    name: str
    new: bool
    figures: int


class Tracked(msgspec.Struct, frozen=True):
    """The content of `tracked/RUN.json`. digest, content: as in `Story`. sent: by tracker; null: not asked for."""

    run: str
    digest: str
    content: str
    mlflow: Sent | None = None
    wandb: Sent | None = None
    otlp: Sent | None = None
