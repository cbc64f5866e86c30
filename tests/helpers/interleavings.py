"""Try every order in which several processes can make their system calls, on a real folder.

Each process is a thread that waits before every file call. Orders that lead to the same state (the same files, and the
same past of each process) are continued only once. A process that is killed after a call makes no further calls, so
each state is also the state after such a kill.
"""

import itertools
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from boto3.s3 import inject, transfer
from botocore.client import BaseClient

from vlmflow.remote.storage import in_place, s3_folder

CALLS = ("rename", "unlink", "rmdir", "mkdir", "listdir", "scandir", "open", "stat", "lstat", "readlink", "symlink")
CALLS += ("utime",)
READS = {"stat", "lstat", "listdir", "scandir", "open", "readlink"}
DAY = 24 * 3600 * 10**9
NOW = 400 * DAY
LATER = NOW + 2 * DAY
MUCH_LATER = NOW + 4 * DAY
"""The time that threads see that are not a `Process`."""
_this = threading.local()
_others = itertools.count(0xF)
"""New names for threads that are not a `Process`: all different."""


class _Killed(BaseException):
    """End a thread so that its `finally` and `except` blocks make no calls."""


class Process(threading.Thread):
    """One process: its function, and its clock in nanoseconds; its new names begin with `letter` (a to f).

    own: a folder that no other process reads or changes, so it does not wait before it reads there.
    outcome: None while it works, then "ok" or the error with which it ended.
    """

    def __init__(self, letter: str, does: Callable[[], None], clock: int = NOW, own: Path | None = None) -> None:
        super().__init__(daemon=True)
        self.letter, self.does, self.clock, self.own = letter, does, clock, own
        self.outcome: Any = None
        self.past: list[Any] = []
        self.descriptors: set[int] = set()
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._is_killed, self._names = False, 0

    def run(self) -> None:
        _this.process = self
        self._may_go.acquire()
        try:
            self.does()
            self.outcome = "ok"
        except _Killed:
            pass
        except Exception as error:
            self.outcome = error
        self._waits.release()

    def step(self) -> None:
        """Make the call before which it waits, and continue to the next one or to the end."""
        self._may_go.release()
        self._waits.acquire()

    def kill(self) -> None:
        self._is_killed = True
        self._may_go.release()
        self.join()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def call(self, name: str, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Wait for its turn, then make a call."""
        if not (self.own and name in READS and not isinstance(args[0], int) and self.own in Path(args[0]).parents):
            self._waits.release()
            self._may_go.acquire()
        if self._is_killed:
            raise _Killed
        told = (name, *(str(arg) for arg in (*args, *named.values()) if isinstance(arg, str | Path)))
        try:
            result = real(*args, **named)
        except Exception as error:
            self.past.append((*told, type(error).__name__))
            raise
        if name == "open":
            self.descriptors.add(result)
        self.past.append((*told, _answer(name, result)))
        return result

    def close(self, descriptor: int, real: Callable[[int], None]) -> None:
        if not self._is_killed:
            real(descriptor)
            self.descriptors.discard(descriptor)

    def new_name(self) -> str:
        self._names += 1
        return f"{self.letter}{self._names:011x}".ljust(32, "0")

    def where(self) -> list[str]:
        """Return the current paths of its open files and folders."""
        return sorted(os.readlink(f"/proc/self/fd/{number}") for number in self.descriptors)


def _answer(name: str, result: Any) -> str:
    """Return the part of a call's answer that can influence the process."""
    if isinstance(result, dict):  # from a storage
        return str([result.get("ETag"), [(each["Key"], each["Size"]) for each in result.get("Contents", [])]])
    return str(sorted(result) if name == "listdir" else result.st_mode if name in ("stat", "lstat") else None)


class _Token:
    def __init__(self) -> None:
        self.hex = _this.process.new_name() if hasattr(_this, "process") else f"{next(_others):032x}"[::-1]


@contextmanager
def requests_in_turn(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every request of a `Process` to an object storage wait for its turn."""
    real = BaseClient._make_api_call

    def request(client: BaseClient, operation: str, named: dict[str, Any]) -> Any:
        process = getattr(_this, "process", None)
        place = named.get("Key") or named.get("Prefix") or ""
        return (
            process.call(f"{operation} {place}", lambda: real(client, operation, named))
            if process
            else real(client, operation, named)
        )

    with patch.context() as each:
        each.setattr(BaseClient, "_make_api_call", request)
        for module in (inject, transfer):
            each.setattr(module, "TransferConfig", partial(transfer.TransferConfig, use_threads=False))
        each.setattr(s3_folder, "uuid4", _Token)
        yield


@contextmanager
def calls_in_turn(patch: pytest.MonkeyPatch, exchange: bool) -> Iterator[None]:
    """Make every file call of a `Process` wait for its turn. exchange: whether names can be exchanged."""

    def in_turn(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            process = getattr(_this, "process", None)
            return process.call(name, real, *args, **named) if process else real(*args, **named)

        return call

    def not_supported(*_: Any) -> bool:
        return False

    def write(source: Path, target: Path, some: bool) -> None:
        content = _content(source)
        _put(target, content[: len(content) // 2] if some else content)

    def copyfile(source: Path, target: Path) -> None:
        for some in (True, False):
            in_turn("write", write)(source, target, some)

    def close(descriptor: int, real: Callable[[int], None] = os.close) -> None:
        process = getattr(_this, "process", None)
        process.close(descriptor, real) if process else real(descriptor)

    def now() -> int:
        return _this.process.clock if hasattr(_this, "process") else MUCH_LATER

    with patch.context() as each:
        each.setattr(shutil, "copyfile", copyfile)
        each.setattr(in_place, "exchange", in_turn("exchange", in_place.exchange if exchange else not_supported))
        each.setattr(in_place.time, "time_ns", now)
        each.setattr(in_place.uuid, "uuid4", _Token)
        for name in CALLS:
            each.setattr(os, name, in_turn(name, getattr(os, name)))
        each.setattr(os, "close", close)
        yield


def _content(file: Path, real_open: Callable[..., int] = os.open) -> bytes:
    with open(real_open(file, os.O_RDONLY), "rb") as stream:
        return stream.read()


def _put(file: Path, content: bytes, real_open: Callable[..., int] = os.open) -> None:
    with open(real_open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), "wb") as stream:
        stream.write(content)


def content_of(place: Path) -> Any:
    """Return the content of a path: bytes, a link's target, a dict by name, or None if it does not exist."""
    if place.is_symlink():
        return str(place.readlink())
    if place.is_dir():
        return {each.name: content_of(each) for each in sorted(place.iterdir())}
    return place.read_bytes() if place.exists() else None


def explore(
    folder: Path,
    prepare: Callable[[], list[Process]],
    check: Callable[[list[Process]], None],
    preemptions: float = math.inf,
    most: int = 30_000,
) -> tuple[int, list[Any]]:
    """Try every order; return the number of states, and the processes' outcomes in every state where all have ended.

    prepare: called for each order, with `folder` empty. check: called once in each state; it may change no file.
    preemptions: at most how often a process is interrupted that could continue. Few find nearly all faults
    (https://doi.org/10.1145/1250734.1250785), and every order of three processes has too many states.

    Raises AssertionError if a check fails, with the order of calls; or if there are more states than `most`.
    """
    seen: set[tuple[str, int, float]] = set()
    ends: list[Any] = []
    orders: list[tuple[list[int], float]] = [([], preemptions)]
    while orders:
        order, left = orders.pop()
        for place in list(folder.iterdir()):
            shutil.rmtree(place)
        processes = prepare()
        for process in processes:
            process.start()
            process.step()
        try:
            _follow(folder, processes, order, left, orders, seen, ends, check)
        except AssertionError as error:
            made = [f"{process.letter}: {call}" for process in processes for call in process.past]
            raise AssertionError("\n".join([str(error), f"order {order}", *made])) from error
        finally:
            for process in processes:
                process.kill()
        assert len(seen) < most
    return len(seen), ends


def _follow(
    folder: Path,
    processes: list[Process],
    order: list[int],
    left: float,
    orders: list[tuple[list[int], float]],
    seen: set[tuple[str, int, float]],
    ends: list[Any],
    check: Callable[[list[Process]], None],
) -> None:
    for number in order:
        processes[number].step()
    order = list(order)
    while True:
        state = repr((content_of(folder), [(process.past, process.where(), process.outcome) for process in processes]))
        last = order[-1] if order and left < math.inf else -1
        if (state, last, left) in seen:
            return
        seen.add((state, last, left))
        check(processes)
        alive = [number for number, process in enumerate(processes) if process.outcome is None]
        if not alive:
            ends.append([process.outcome for process in processes])
            return
        alive.sort(key=lambda number: number != last)
        left_then = left - (alive[0] == last)
        orders += [([*order, number], left_then) for number in alive[1:] if left_then >= 0]
        order.append(alive[0])
        processes[alive[0]].step()


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """Return a copy of a folder, to continue from a state as if all processes had been killed."""
    copy = folder.with_name(folder.name + "-copy")
    with suppress(FileNotFoundError):
        shutil.rmtree(copy)
    for place in [folder, *folder.rglob("*")]:
        other = copy / place.relative_to(folder)
        other.mkdir() if place.is_dir() else _put(other, place.read_bytes())
    yield copy
