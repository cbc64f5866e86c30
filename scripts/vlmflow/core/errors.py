"""The one exception that a stage may end with on purpose."""


class VlmflowError(Exception):
    """A failure that a person can act on.

    cause: what is wrong, with the file, row, key and value it concerns.
    next_step: what to do about it, as an instruction. Keys stand with their whole path; `datasets.NAME` and `runs.NAME`
    are those of the stage that fails, which has the name.
    """

    def __init__(self, cause: str, next_step: str) -> None:
        super().__init__(cause, next_step)
        self.cause = cause
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.cause}\n  what to do: {self.next_step}"


class PassingError(VlmflowError):
    """A failure that another attempt may not meet: a full disk, a server that is away, an interruption.

    Every other VlmflowError would come again, so that a cluster does not try its job again.
    """
