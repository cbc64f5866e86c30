"""The two halves of val: the rows of one choose, those of the other judge what was chosen.

Who compares many checkpoints or trials by some rows, and keeps the best, has picked its luck on these rows, too. Of 20
equal models the best one is called better than another by the rows that chose it several times as often as by others
(`tests/unit/rows/test_mixture.py`).

Chooses the pictures, or the prompts of rows without pictures, that are held out of the train split.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vlmflow.core.errors import log
from vlmflow.rows.chat import Reject, dialogue_start
from vlmflow.rows.row_check import CheckedRows, Verdict
from vlmflow.rows.sharegpt import ShareGptRow

if TYPE_CHECKING:  # it imports numpy, which takes as long as all other imports here
    from vlmflow.pictures.look_alikes import LookAlike


Part = Literal["chooses", "judges"]
"""chooses: by its validation loss a training keeps its best checkpoint, and by it a search ranks its trials. judges:
on it the evaluation of a run, and the comparison of a search's best trial with the run's own settings, rest."""

FEWEST_TO_HALVE = 200
"""With fewer groups all rows do both: half of them would be too few for an interval (`evaluation.report`)."""


def group_of(row: ShareGptRow, pictures: Mapping[str, str], one_prompt: bool = False) -> str:
    """Return the digest of the set of a row's pictures, or without one of its question: rows with the same are alike.

    pictures: the SHA-256 of every picture, by its name in the store. one_prompt: all questions are the same, so the
    first answer belongs to it.
    """
    start = dialogue_start(row.conversations)
    prompt = " ".join(turn.value for turn in row.conversations[start : start + 1 + one_prompt])
    question = " ".join(prompt.split()).casefold()
    content = "\0".join(sorted({pictures[name] for name in row.images})) if row.images else question
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def half_of(groups: Iterable[str], part: Part) -> frozenset[str] | None:
    """Return the groups of val whose rows choose, or judge; None if there are too few: then all rows do both.

    groups: those of all rows of val. They are digests, so the lower half of them in order is a random one. It is the
    same for all runs on a data set: no run has chosen by what judges another.
    """
    names = sorted(set(groups))
    if len(names) < FEWEST_TO_HALVE:
        return None
    middle = len(names) // 2
    return frozenset(names[:middle] if part == "chooses" else names[middle:])


FindLookAlikes = Callable[[frozenset[bytes]], "Mapping[bytes, LookAlike]"]
"""Takes the SHA-256 digests of the test split's pictures; returns the other pictures that look like one, by SHA-256."""


def hold_out(
    rows: Mapping[bytes, int],
    share: float,
    key: str,
    forbidden: frozenset[bytes],
    connected: Mapping[bytes, Sequence[bytes]] = {},
) -> frozenset[bytes]:
    """Return the groups (digests of pictures or prompts) whose rows are held out.

    Groups are taken in an order that depends only on the key and their digests, until they have `share` of the rows. If
    the share is more than 0, at least one is taken. A group is held out as a whole, so that no group is in two splits,
    and with all that are connected with it if these have no more rows than the share: others have what it has, and
    would be in no split.

    rows: the number of usable rows of each group, at least 1. key: at most 64 bytes; another key gives another order.
    forbidden: groups that are not in the train split anyway; their rows do not count. connected: see
    `CheckedRows.connected`.
    """
    free = rows.keys() - forbidden
    most = wanted = share * sum(rows[digest] for digest in free)
    chosen: set[bytes] = set()
    for digest in sorted(free, key=lambda digest: hashlib.blake2b(digest, key=key.encode()).digest()):
        if wanted <= 0:
            break
        if digest in chosen:
            continue
        together = [group for group in connected.get(digest, [digest]) if group in free]
        if sum(rows[group] for group in together) > most:
            together = [digest]
        chosen.update(together)
        wanted -= sum(rows[group] for group in together)
    return frozenset(chosen)


@dataclass(frozen=True)
class HeldOut:
    """Where rows of the raw train and validation splits belong.

    test, val: the groups of the raw train split that become test and val. in_test, in_val: what these splits have, and
    the raw test and validation splits (`row_check.Grouped.parts`). near: the pictures that look like one of test, by
    their SHA-256. asks: the groups that ask nearly what a test row asks.
    """

    test: frozenset[bytes]
    val: frozenset[bytes]
    in_test: frozenset[bytes]
    in_val: frozenset[bytes]
    near: "Mapping[bytes, LookAlike]"
    asks: frozenset[bytes]

    def near_test(self, verdict: Verdict) -> Reject | None:
        """Return why a row is in no split: it has what a test row has, or nearly. None if it has not."""
        parts = verdict.parts
        if common := shared(verdict.pictures, parts, self.in_test):
            return Reject("in_test_split", f"{common} of the test split")
        for number, digest in enumerate(parts):
            if match := self.near.get(digest):
                like = f"the test split's picture with sha256 {match.sha256.hex()}"
                return Reject(
                    "near_test_picture", f"{verdict.pictures[number]} is {match.distance} of 64 bits from {like}"
                )
        if verdict.group in self.asks:
            return Reject("near_test_question", "near_duplicates.jsonl names the test row")
        return None

    def split_of(self, verdict: Verdict) -> str | Reject:
        """Return the split of a row of the raw train split, or why it is in none."""
        if verdict.group in self.test:
            return "test"
        if rejected := self.near_test(verdict):
            return rejected
        if verdict.group in self.val:
            return "val"
        if common := shared(verdict.pictures, verdict.parts, self.in_val):
            return Reject("in_val_split", f"{common} of the validation split")
        return "train"


def shared(pictures: Sequence[str], parts: Sequence[bytes], others: Set[bytes]) -> str:
    """Return the first picture, or the prompt, that a row shares with a split, for people; "" if there is none.

    pictures, parts: of the row (`row_check.Verdict`). others: the parts of the split's rows.
    """
    if others.isdisjoint(parts):
        return ""
    number = next(number for number, part in enumerate(parts) if part in others)
    return f"{pictures[number]} is a picture" if pictures else "its prompt is one"


def held_out(
    checked: Mapping[str, CheckedRows],
    test_parts: Set[bytes],
    test_questions: Set[bytes],
    test_share: float,
    val_share: float,
    seed: int,
    find_look_alikes: FindLookAlikes,
) -> HeldOut:
    """Draw test and val from the raw train split, unless they are raw splits.

    checked: the verdicts by raw split. test_parts, test_questions: those of the raw test split (`row_check.Grouped`).
    The others are settings of the data set. What the raw validation split has is not drawn for test.
    """
    train = checked["train"]
    raw_val = checked["val"].parts if "val" in checked else frozenset()
    connected = train.connected() if train.several else {}
    of_val = train.groups_with(raw_val)
    test = hold_out(train.groups, 0.0 if "test" in checked else test_share, f"{seed} test", of_val, connected)
    in_test = test_parts | train.parts_of(test)
    near = find_look_alikes(frozenset(in_test))
    of_test = test_questions | {train.questions[group] for group in test & train.questions.keys()}
    questions = train.questions | (checked["val"].questions if "val" in checked else {})
    asks = frozenset(group for group, question in questions.items() if question in of_test)
    taken = train.groups_with(in_test | near.keys()) | asks
    val = hold_out(train.groups, 0.0 if "val" in checked else val_share, str(seed), taken, connected)
    in_val = raw_val | train.parts_of(val)
    if left_out := sum(train.groups[group] for group in train.groups_with(in_val) - val - taken):
        log.warning(
            "%d of %d rows have a picture of val beside others, and are in no split: give val as "
            "files (datasets.NAME.val), or a smaller val_share",
            *(left_out, sum(train.groups.values())),
        )
    return HeldOut(test, val, frozenset(in_test), in_val, near, asks)
