"""What a proven model folder carries: `proof.json`, with what was checked and the digest of every file."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json, write_json
from vlmflow.core.integrity import Record, read_files, refuse_changed, remember

PROOF = "proof.json"

WRITTEN_AFTERWARDS = frozenset({"README.md", "provenance.json"})
"""Files about the model that a published folder gets; they may differ from the base's, or be new."""

PACKAGES = (
    "snakemake",
    "ms-swift",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "pillow",
    "msgspec",
)

COMMIT_VARIABLE = "VLMFLOW_COMMIT"
"""Names the commit where there is no checkout, as in an image."""


@dataclass(frozen=True)
class Proven:
    """How the files of a proven folder looked when `write_proof` read them, and when it began to, in ns."""

    files: Record
    began: int


def write_proof(folder: Path, checks: dict[str, Any], code: Path) -> Proven:
    """Write `proof.json` into a folder whose files passed `checks`.

    checks: what each check found, by its name (`tensors`, `logits`; null where it was not wanted).
    code: the checkout, for its commit.
    """
    # A base may bring a proof of its own, whose place this one takes.
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / PROOF]
    began = time.time_ns()
    names = [file.relative_to(folder).as_posix() for file in files]
    found = read_files("writing the digests of proven files", "files", folder, names)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    write_json(
        folder / PROOF,
        {
            "checks": checks,
            "files": {name: {"size": seen.size, "sha256": seen.sha256} for name, seen in found.items()},
            "git_commit": git_commit(code),
            "versions": {"python": platform.python_version()} | versions,
        },
    )
    return Proven(found, began)


def read_proof(folder: Path) -> dict[str, Any]:
    """Give what `write_proof` wrote into `folder`, whose files must still be those of then, and no others.

    Raises VlmflowError where a file is missing, is new or has other bytes.
    """
    proof: dict[str, Any] = read_json(folder / PROOF)
    proven = {name: file["size"] for name, file in proof["files"].items()}
    found = {
        file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()
    }
    ours = {PROOF, ".snakemake_timestamp"}  # the second is Snakemake's mark in a folder that a rule made
    changed = sorted(name for name in (proven.keys() | found.keys()) - ours if proven.get(name) != found.get(name))
    again = f"remove {folder} and run the same command again: the workflow merges and proves it again"
    if changed:
        raise VlmflowError(
            f"{folder}: {len(changed)} files differ from those that were proven: {', '.join(changed[:5])}", again
        )
    digests = {name: file["sha256"] for name, file in proof["files"].items()}
    refuse_changed("model files", folder, digests, _record(folder), again)
    return proof


def remember_proven(folder: Path, proven: Proven) -> None:
    """Keep how the files of `folder` look, so that `read_proof` need not read them again."""
    remember(_record(folder), proven.files, proven.began)


def _record(folder: Path) -> str:
    return f"verified/{folder.name}"


def take_over(folder: Path, target: Path) -> None:
    """Give every file of `folder` a second name below `target`, or a copy where that is on another disk."""
    shutil.copytree(folder, target, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def git_commit(code: Path) -> str | None:
    """Give the commit of the checkout `code`, marked "+changes" where files differ; None where there is none."""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    try:
        head = _git(code, "rev-parse", "HEAD")
        return head + ("+changes" if _git(code, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(code: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(code), *words], capture_output=True, text=True, check=True).stdout.strip()
