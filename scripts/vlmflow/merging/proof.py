"""What a proven model folder carries: `proof.json`, with what was checked and the digest of every file."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from vlmflow.errors import VlmflowError
from vlmflow.files import read_json, sha256_of, write_json
from vlmflow.integrity import look, refuse_changed, remember

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


def write_proof(folder: Path, checks: dict[str, Any], code: Path) -> None:
    """Write `proof.json` into a folder whose files passed `checks`.

    checks: what each check found, by its name (`tensors`, `logits`; null where it was not wanted).
    code: the checkout, for its commit.
    """
    files = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": sha256_of(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file != folder / PROOF  # a base may bring its own, whose place this one takes
    }
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    write_json(
        folder / PROOF,
        {
            "checks": checks,
            "files": files,
            "git_commit": git_commit(code),
            "versions": {"python": platform.python_version()} | versions,
        },
    )


def read_proof(folder: Path) -> dict[str, Any]:
    """Give what `write_proof` wrote into `folder`, whose files must still be those of then, and no others.

    Raises VlmflowError where a file is missing, is new or has other bytes.
    """
    proof = read_json(folder / PROOF)
    proven = {name: file["size"] for name, file in proof["files"].items()}
    found = {
        file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()
    }
    ours = {PROOF, ".snakemake_timestamp"}  # the second is Snakemake's mark in a folder that a rule made
    changed = sorted(name for name in (proven.keys() | found.keys()) - ours if proven.get(name) != found.get(name))
    again = f"remove {folder} and run the same command again: it is merged and proven anew"
    if changed:
        raise VlmflowError(
            f"{folder}: {len(changed)} files are not those that were proven: {', '.join(changed[:5])}", again
        )
    refuse_changed("model files", folder, _digests(proof), _record(folder), again)
    return proof


def remember_proven(folder: Path) -> None:
    """Keep how the files of `folder` look, which `write_proof` has just read: `read_proof` need not read them again."""
    remember(_record(folder), look(folder, _digests(read_json(folder / PROOF))))


def _record(folder: Path) -> str:
    return f"verified/{folder.name}"


def _digests(proof: dict[str, Any]) -> dict[str, str]:
    return {name: file["sha256"] for name, file in proof["files"].items()}


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
