"""A model's repository on the hub: asks about it, makes it, sends files in one commit, reads digests back, tags.

It uses huggingface_hub, which finds the token (HF_TOKEN, `hf auth login`) and the hub (HF_ENDPOINT) by itself, and
sends the token to the hub alone. An upload is resumed: the hub keeps a sent file, or its blocks, before any commit
names it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils._runtime import is_xet_available

from vlmflow.core.errors import PassingError, VlmflowError, printable
from vlmflow.core.patience import AGAIN, PASSING_STATUS
from vlmflow.core.progress import amount
from vlmflow.fetch.hub import TIMEOUT
from vlmflow.fetch.transport import host_of
from vlmflow.publish.package import OutgoingFile, Package

OF_THE_HUB = ".gitattributes"
"""The file that the hub itself writes into a new repository."""

UNREACHED = (
    "check this machine's network, its proxy (HTTPS_PROXY) and HF_ENDPOINT, then run the same command again: what has "
    "arrived is not sent again"
)
"""The next step if the hub could not be reached."""

NAME = re.compile(r"[^/]+/[^/]+")


@dataclass(frozen=True)
class Repository:
    """A repository as it is now. files: the digest of each (as `HubFile.etag`), by name. head: its newest commit."""

    name: str
    private: bool
    head: str
    files: dict[str, str]


def look_at(name: str) -> Repository | None:
    """Return a repository; None if there is none that this token may see. Nothing is sent or made.

    name: OWNER/NAME.

    Raises VlmflowError if the name is none, there is no token, or the hub refuses.
    """
    with _in_our_words(name):
        if not NAME.fullmatch(name):
            raise HFValidationError
        validate_repo_id(name)
        if get_token() is None:
            raise VlmflowError(
                f"{name}: there is no token for the hub",
                "make one that may write to this repository alone, and set it: HF_TOKEN or `hf auth login`",
            )
        try:
            return _read(name, None)
        except RepositoryNotFoundError:
            return None


def refuse_unless_fits(name: str, repo: Repository | None, package: Package, public: bool) -> None:
    """Refuse a repository that everybody sees, unless told so, and one whose own files would change what is loaded.

    A loader takes whatever lies there: an earlier `model.safetensors` wins over new shards. public: told so.

    Raises VlmflowError.
    """
    if repo and not repo.private and not public:
        raise VlmflowError(
            f"{name} exists and is public", "give another repository; or say that everybody may have it: --public"
        )
    if others := sorted(repo.files.keys() - package.files.keys() - {OF_THE_HUB} if repo else ()):
        raise VlmflowError(
            f"{name} has {len(others)} files that are not of this run, and nobody verified them with it: "
            f"{printable(', '.join(others[:5]))}",
            "give another repository, or delete them on its page",
        )


def create(name: str, private: bool) -> Repository:
    """Make a repository and return it.

    Raises VlmflowError if somebody else made it meanwhile, or the hub gives it another visibility.
    """
    with _in_our_words(name):
        HfApi().create_repo(name, private=private)
        made = _read(name, None)
    if made.private != private:
        raise VlmflowError(
            f"{name}: asked for {_visibility(private)}, the hub made it {_visibility(made.private)}; nothing sent",
            "change it on its page, or ask its owner",
        )
    return made


def _visibility(private: bool) -> str:
    return "private" if private else "public"


def send(repo: Repository, package: Package) -> str:
    """Send the files and commit them at once, on top of the commit seen before; return the new commit.

    A file that the hub has already is not sent again. If nothing differs, there is no new commit.

    Raises VlmflowError if the hub refuses; PassingError if it cannot be reached.
    """
    api, name = HfApi(), repo.name
    additions = [CommitOperationAdd(path, file.content) for path, file in package.files.items()]
    with _in_our_words(name):
        for number, addition in enumerate(additions, 1):
            size = amount(package.files[addition.path_in_repo].size, "bytes")
            print(f"sending {number} of {len(additions)}: {printable(addition.path_in_repo)} ({size})", flush=True)
            api.preupload_lfs_files(name, [addition], free_memory=False)
        commit = api.create_commit(
            name, additions, commit_message=f"Weights verified by vlmflow ({package.tag})", parent_commit=repo.head
        )
    return commit.oid


def refuse_other_bytes(name: str, revision: str, files: dict[str, OutgoingFile]) -> None:
    """Compare what the hub has at a revision with what was sent: each file's SHA-256 in LFS, else its git blob.

    Raises VlmflowError with the files that are missing, new or different.
    """
    with _in_our_words(name):
        on_hub = _read(name, revision).files
    sent = {path: file.git_blob() if len(on_hub.get(path, "")) == 40 else file.sha256 for path, file in files.items()}
    there = {path: digest for path, digest in on_hub.items() if path != OF_THE_HUB}
    if differ := sorted(path for path in sent.keys() | there.keys() if sent.get(path) != there.get(path)):
        raise VlmflowError(
            f"{name} at {printable(revision)}: {len(differ)} files are not those that were sent: "
            f"{printable(', '.join(differ[:5]))}",
            "do not use this revision: delete these files on its page and run the same command again; if they differ "
            "again, report it to the hub",
        )


def tag(name: str, package: Package, commit: str) -> None:
    """Give a commit the package's tag. One that exists may name another commit with the same bytes.

    Raises VlmflowError if the hub refuses, or the tag names other bytes.
    """
    with _in_our_words(name):
        HfApi().create_tag(name, tag=package.tag, revision=commit, exist_ok=True)
    refuse_other_bytes(name, package.tag, package.files)


def address(name: str, package: Package) -> str:
    """Return the page of what was published."""
    return f"{constants.ENDPOINT}/{name}/tree/{package.tag}"


def _read(name: str, revision: str | None) -> Repository:
    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT)
    files = {entry.rfilename: entry.lfs.sha256 if entry.lfs else entry.blob_id for entry in info.siblings or []}
    digests = {path: digest for path, digest in files.items() if isinstance(digest, str)}
    if not isinstance(info.sha, str) or not isinstance(info.private, bool) or len(digests) != len(files):
        raise ValueError
    return Repository(name, info.private, info.sha, digests)


@contextmanager
def _in_our_words(name: str) -> Iterator[None]:
    """Convert the errors of huggingface_hub and hf_xet; their texts hold signed addresses and what a server wrote."""
    try:
        yield
    except VlmflowError:
        raise
    except HFValidationError:
        raise VlmflowError(
            f"{printable(name)!r} is no name of a repository on the hub", "write: --to OWNER/NAME"
        ) from None
    except OfflineModeIsEnabled:
        raise VlmflowError(f"{name}: HF_HUB_OFFLINE forbids access to the hub", "unset it for this command") from None
    except Exception as error:
        raise _refusal(name, error) from None


def _refusal(name: str, error: BaseException) -> VlmflowError:
    """Return what a failure means. huggingface_hub wraps that of an upload in a RuntimeError."""
    if isinstance(error, RuntimeError) and error.__cause__:
        return _refusal(name, error.__cause__)
    host = host_of(constants.ENDPOINT)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403, 404):
            return VlmflowError(
                f"{name}: {host} does not let this token write there ({status})",
                "check the name and its owner, and set a token that may write: HF_TOKEN or `hf auth login`",
            )
        if status in (409, 412):
            return PassingError(
                f"{name} changed meanwhile: somebody else writes to it ({status})", "look at it, then run again"
            )
        if status in PASSING_STATUS:
            return PassingError(f"{name}: {host} answers {status}", AGAIN)
        return VlmflowError(f"{name}: {host} answers {status}", "read its page, then run the same command again")
    if isinstance(error, httpx.HTTPError):
        return PassingError(f"{name}: {type(error).__name__} at {host}", UNREACHED)
    # hf_xet raises ConnectionError.
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        raise error
    hint = " (a hub without Xet storage needs HF_HUB_DISABLE_XET=1)" if is_xet_available() else ""
    return PassingError(
        f"{name}: the upload failed with {type(error).__name__}", f"check HF_ENDPOINT{hint}, then {AGAIN}"
    )
