"""Long work: its progress (count, rate and time left), its threads, and a question to the person at the terminal."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

from vlmflow.core.errors import log

Item = TypeVar("Item")

TERMINAL_INTERVAL = 0.5
LOG_INTERVAL = 10.0
"""Seconds between two lines: on a terminal, which overwrites the last one, and in a log."""

SILENCE = 30.0
"""Seconds after which work that counts nothing says that it goes on."""


class Progress:
    """A counter that reports itself on standard error.

    label: the work and its subject ("resolve_images fire/train").
    total: the number of units; 0 if unknown.
    unit: what is counted ("rows", "pictures", "bytes").
    """

    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.count = 0
        self._begun = time.monotonic()
        self._offset = 0
        self._shown = self._begun
        self._terminal = sys.stderr.isatty()
        self._interval = TERMINAL_INTERVAL if self._terminal else LOG_INTERVAL
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._show(now, last=True)
        log.debug(self.line(now - self._begun))  # for the log file; the console already has it

    def start_at(self, count: int) -> None:
        """Start with `count` units that an earlier run has done (a resumed download); they do not enter the rate."""
        self.count = self._offset = count

    def advance(self, units: int = 1) -> None:
        """Count `units` more as done (negative for dropped ones), from any thread.

        Shows the progress if the last line is old enough, and more units are to come: the end of the block shows all.
        """
        with self._lock:
            self.count += units
            now = time.monotonic()
            if self.count != self.total and now - self._shown >= self._interval:
                self._shown = now
                self._show(now)

    def line(self, seconds: float) -> str:
        """Return the report after `seconds` of work: count, rate, and the time left.

        If the total is reached or unknown, the report has the time taken instead of the time left.
        """
        rate = (self.count - self._offset) / seconds if seconds > 0 else 0.0
        parts = [f"{self.label}: {amount(self.count, self.unit)}"]
        if self.total:
            parts[0] = f"{self.label}: {amount(self.count, self.unit, False)} of {amount(self.total, self.unit)}"
        parts.append(f"{amount(rate, self.unit)}/s")
        if rate and self.total > self.count:
            parts.append(f"{clock((self.total - self.count) / rate)} left")
        else:
            parts.append(clock(seconds))
        return " · ".join(parts)

    def _show(self, now: float, last: bool = False) -> None:
        line = self.line(now - self._begun)
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


def in_threads(
    items: Iterable[Item], work: Callable[[Item], object], threads: int, stop: Callable[[], object] = bool
) -> None:
    """Call `work(item)` for every item, in so many threads, for work that waits for network or disk.

    stop: makes running work end early; called when an item fails.

    Raises the first exception of an item.
    """
    left = iter(list(items))  # threads can share a list's iterator: taking an item is a single call
    errors: list[BaseException] = []

    def work_on() -> None:
        try:
            for item in left:
                if errors:
                    return
                work(item)
        except BaseException as error:
            errors.append(error)
            stop()

    workers = [threading.Thread(target=work_on, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException as interruption:  # this thread was interrupted, and does not wait for the others any more
        errors.append(interruption)
        stop()
        raise
    if errors:
        raise errors[0]


@contextmanager
def lines_meanwhile(label: str) -> Iterator[None]:
    """Say every half minute that the work in this block goes on, and since when. label: its name for people."""
    ended, begun = threading.Event(), time.monotonic()

    def speak() -> None:
        while not ended.wait(SILENCE):
            print(f"{label}: running for {clock(time.monotonic() - begun)}", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()


def amount(count: float, unit: str, with_unit: bool = True) -> str:
    """Format a count for people: 12,345 rows; bytes in MB."""
    if unit == "bytes":
        number, unit = f"{count / 1e6:,.1f}", "MB"
    else:
        number = f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"
    return f"{number} {unit}" if with_unit else number


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss if it is under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def agrees(question: str) -> bool:
    """Return whether the person answers yes; Enter and the end of the input are a no."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
