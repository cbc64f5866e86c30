"""The ways in which a job elsewhere can end. Every executor uses these words; each has a reader of its own."""

from dataclasses import dataclass
from typing import Any, Literal

MORE_MEMORY = 1.5
"""The memory of the next attempt, relative to one that was killed for its memory."""


@dataclass(frozen=True)
class Ended:
    """The end of one try of a job.

    how: "failed" by an error of its own; "lost" with its machine, or removed by somebody; "preempted" by whoever needs
    its place; "out of time" or "out of memory", at its limit; "refused" before it began. cause: for people. again:
    whether another attempt may help.
    """

    how: Literal["failed", "lost", "preempted", "out of time", "out of memory", "refused"] = "failed"
    cause: str = ""
    again: bool = True

    @property
    def taken_away(self) -> bool:
        """Whether the job itself did not fail: it may be made again within the same attempt."""
        return self.how in ("lost", "preempted")


class Attempts:
    """The attempts of an invocation's jobs. Snakemake counts them; an executor can only tell it that none is left.

    most_mem_mb: the memory limit, in MB, of an attempt after one that was killed for its memory.
    """

    def __init__(self, most_mem_mb: int) -> None:
        self._most = most_mem_mb
        self._mem_mb: dict[str, int] = {}

    def mem_mb(self, words: str, asked: int) -> int:
        """Return the memory, in MB, of the next attempt of a job. words: its rule and wildcards. asked: by its rule."""
        return self._mem_mb.get(words, asked)

    def after(self, job: Any, words: str, asked: int, ended: Ended) -> str:
        """Decide whether Snakemake tries a job again, and with how much memory; returns the cause, and what follows.

        job: Snakemake's. words, asked: as for `mem_mb`.
        """
        cause, again, before = ended.cause, ended.again, self.mem_mb(words, asked)
        if ended.how == "out of memory":
            more = min(int(before * MORE_MEMORY), self._most)
            again, self._mem_mb[words] = more > before, more
            cause += f" ({before} MB)"
            if not again:
                cause += "; cluster.max_mem_mb allows no more"
            elif job.restart_times > job.attempt - 1:
                cause += f"; the next attempt gets {more} MB"
        if not again:
            # Snakemake only counts attempts: this is the way to prevent a retry.
            job.attempt = max(job.attempt, job.restart_times + 1)
            cause += "\nThis job is not retried: it would fail in the same way."
        return cause
