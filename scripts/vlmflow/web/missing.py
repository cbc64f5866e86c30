"""Why a picture could not be fetched."""

import msgspec

REASONS = {
    "no_source": "no row of picture_sources.yaml matches its path",
    "by_hand": "the source must be downloaded by hand",
    "refused": "the server does not have it, or refuses it",
    "no_member": "the archive has no such name",
    "failed": "the server failed too often, or the archive is not the expected one",
    "unreadable": "the archive cannot be read: unknown format, or damaged",
    "damaged": "the bytes differ from the archive's directory",
    "too_large": "larger than picture_limits.max_bytes",
    "name_conflict": "another picture's path runs through it, as if it were a folder",
}
"""All reasons, for people."""


class Missing(msgspec.Struct, frozen=True):
    """Why a picture could not be fetched.

    reason: a key of REASONS.
    detail: the exact cause, for people.
    """

    reason: str
    detail: str


CHECK_PROXIES = "check proxies and HF_ENDPOINT, then run the same command again"
"""The next step where a server refuses a file that the hub has."""


class Refused(Exception):
    """A source refuses a file permanently; `missing` has the reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.missing = Missing(reason, detail)
