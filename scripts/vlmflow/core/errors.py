"""The exceptions that a stage raises on purpose."""


class VlmflowError(Exception):
    """A failure that a person can act on.

    cause: what is wrong, with its file, row, key and value.
    next_step: what to do, as an instruction. Keys have their full path; `harness.stage` replaces NAME in
    `datasets.NAME` and `runs.NAME`.
    """

    def __init__(self, cause: str, next_step: str) -> None:
        super().__init__(cause, next_step)
        self.cause = cause
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.cause}\n  what to do: {self.next_step}"


class PassingError(VlmflowError):
    """A failure that another attempt may avoid: a full disk, an unreachable server, an interruption.

    Every other VlmflowError would occur again, so a cluster does not retry its job.
    """


class InterruptedTrainingError(PassingError):
    """A training that a signal ended before its target. saved: whether it saved progress since it started."""

    def __init__(self, cause: str, next_step: str, saved: bool) -> None:
        super().__init__(cause, next_step)
        self.saved = saved
