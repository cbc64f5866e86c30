"""Sends a finished run's verified weights, or its adapter, to a repository on the hub.

Every file is compared with its digest before anything is sent, and again as the hub has it. The token is HF_TOKEN's, or
that of `hf auth login`. A killed upload is resumed by the same command.
"""

import sys
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars

from vlmflow.core.errors import VlmflowError, printable
from vlmflow.core.progress import agrees
from vlmflow.publish import repository
from vlmflow.publish.package import Package, Rights, adapter_package, merged_package, read_provenance, rights_of
from vlmflow.serving.finished_run import refuse_no_name


def main(run: str, to: str, folder: Path, adapter: bool, public: bool, yes: bool) -> None:
    """Check, show, ask, send, read back, tag.

    run: its name. to: OWNER/NAME. folder: the working directory. adapter: the adapter instead of the merged weights.
    public: a new repository is for everybody, and an existing one may be. yes: send without asking.

    Raises VlmflowError if no run is named, something is not verified, a licence or the repository forbids it, or the
    hub refuses.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()  # they overwrite a line of a terminal; a log gets a line per file
    refuse_no_name(run)
    merged = folder / "merged" / run
    facts = read_provenance(merged)
    rights = rights_of(*(training.rights for training in facts.rounds))
    repo = repository.look_at(to)
    if adapter:
        package = adapter_package(merged, folder / "checkpoints" / run / "full", facts)
    else:
        package = merged_package(merged, facts)
    repository.refuse_unless_fits(to, repo, package, public)
    private = repo.private if repo else not public
    _show(to, repo is not None, package, rights, facts.rounds[-1].base_model.source, private)
    if not yes and not sys.stdin.isatty():
        raise VlmflowError("nothing sent: there is no terminal to ask on", "add --yes to send what is listed")
    if not yes and not agrees(f"Send all of it to {to}{'' if private else ', for everybody to see'}?"):
        print("nothing sent")
        return
    commit = repository.send(repo or repository.create(to, private), package)
    repository.refuse_other_bytes(to, commit, package.files)
    repository.tag(to, package, commit)
    print(f"published: {repository.address(to, package)}\n  every digest on the hub is that of the verified file")


def _show(to: str, exists: bool, package: Package, rights: list[Rights], base: str, private: bool) -> None:
    for name, file in package.files.items():
        print(f"{file.size:>16,} bytes  {file.sha256[:12]}  {printable(name)}")
    print(f"{package.size:>16,} bytes  in {len(package.files)} files")
    print("licences:")
    for right in rights:
        print(f"  {right}")
    print(f"  its own, which is not recorded here: base model {printable(base)}")
    if package.paths:
        print(f"names of this machine in the files: {printable(', '.join(package.paths))}")
    state = "exists, is" if exists else "new,"
    print(f"to: {to} ({state} {'private' if private else 'PUBLIC: everybody may have it'}), tag {package.tag}")
