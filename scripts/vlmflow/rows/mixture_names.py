"""The names that rows, their sources and their pictures have in a mixture: that of their data set comes first."""

from vlmflow.raw.named import UNKNOWN_SOURCE

MARK = ":"
"""It ends a data set's name in an id; neither names of data sets nor ids of rows have it."""


def id_in_mixture(member: str, identity: str, copy: int = 1) -> str:
    """Return the id of a row; the copies of one that is repeated have different ones.

    It ends as the row's own id, which may name an attempt or a single turn. copy: counted from 1.
    """
    return f"{member}{MARK}{identity}" if copy == 1 else f"{member}{MARK}{copy}{MARK}{identity}"


def member_of(identity: str) -> str:
    """Return the data set that a row of a mixture is from; "" for a row of any other data set."""
    return identity.partition(MARK)[0] if MARK in identity else ""


def own_id(identity: str) -> str:
    """Return the id that a row has in its own data set."""
    return identity.rpartition(MARK)[2]


def source_in_mixture(member: str, source: str) -> str:
    """Return the source of a row; that of rows that name none is their data set."""
    return member if source == UNKNOWN_SOURCE else f"{member}/{source}"


def sources_of(identity: str, source: str) -> list[str]:
    """Return under which names a row is reported by source: its own, and in a mixture also that of its data set.

    identity, source: those of the row.
    """
    return sorted({source, member_of(identity) or source})


def picture_in_mixture(member: str, name: str) -> str:
    """Return a picture's name in the store of the mixture, which has a link to that of the data set."""
    return f"{member}/{name}"
