"""Which weights a run has: what was evaluated or asked must be these, and not those of an earlier training."""

from pathlib import Path

import msgspec

from vlmflow.core.account import read_account
from vlmflow.fetch.model_folder import digest_of_files
from vlmflow.fetch.published_run import PROVENANCE
from vlmflow.merging.proof import PROOF, WRITTEN_AFTERWARDS, Proof, proven_digest
from vlmflow.merging.published_limits import LimitedFile


class _BaseModel(msgspec.Struct, frozen=True):
    files: dict[str, str]


class _Record(msgspec.Struct, frozen=True):
    """The used part of provenance.json (reports/accounts, Provenance), also of other versions."""

    base_model: _BaseModel
    merged: dict[str, str]
    picture_limits: LimitedFile | None = None


def proven_weights(verified: Path, merged: Path) -> str | None:
    """Return the digest of a run's proven weights (`merging.proof.proven_digest`); None if the run has none.

    verified, merged: verified/RUN and merged/RUN; the second tells it if the first was removed.

    Raises VlmflowError if the file that tells it is damaged.
    """
    if (verified / PROOF).is_file():
        return proven_digest(read_account(verified / PROOF, Proof))
    return published_weights(merged) if (merged / PROVENANCE).is_file() else None


def published_weights(merged: Path) -> str:
    """Return the digest that the weights in merged/RUN had when they were proven (`merging.proof.proven_digest`).

    Raises VlmflowError if its provenance is missing or damaged.
    """
    record = read_account(merged / PROVENANCE, _Record)
    # The proven folder has the base's own files of these names, which the published folder replaces.
    of_base = {name: digest for name, digest in record.base_model.files.items() if name in WRITTEN_AFTERWARDS}
    limited = record.picture_limits
    return digest_of_files(record.merged | of_base | ({limited.file: limited.proven} if limited else {}))
