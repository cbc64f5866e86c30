"""The only exception that a stage raises on purpose."""


class VlmflowError(Exception):
    """A failure that a person can act on.

    cause: what is wrong, with the file, row, key and value it concerns.
    next_step: what to do about it, as an instruction. Keys have their full path; `datasets.NAME` and `runs.NAME` mean
    those of the failing stage, which knows the name.
    """

    def __init__(self, cause: str, next_step: str) -> None:
        super().__init__(cause, next_step)
        self.cause = cause
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.cause}\n  what to do: {self.next_step}"


class PassingError(VlmflowError):
    """A failure that another attempt may avoid: a full disk, an unreachable server, an interruption.

    Every other VlmflowError would repeat, so a cluster does not retry its job.
    """
