"""Why a picture could not be fetched."""

import msgspec

REASONS = {
    "no_source": "no row of picture_sources.yaml names where such a path comes from",
    "by_hand": "the source must be downloaded by hand",
    "refused": "the server has it not, or does not give it",
    "no_member": "the archive holds no such name",
    "failed": "the server failed too often, or the archive is not the one that is expected",
    "unreadable": "the archive cannot be read: no such format, or broken",
    "damaged": "the bytes differ from the archive's directory",
    "too_large": "larger than picture_limits.max_bytes",
    "name_conflict": "another picture's path runs through it, as if it were a folder",
}
"""A closed set."""


class Missing(msgspec.Struct, frozen=True):
    """Why a picture could not be fetched.

    reason: a key of REASONS.
    detail: what exactly, for a person.
    """

    reason: str
    detail: str


class Refused(Exception):
    """What a source does not give, and will not a moment later; `missing` says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.missing = Missing(reason, detail)
