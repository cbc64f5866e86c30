"""Asks the Hugging Face hub about its repositories: commits, files, sizes, digests and addresses.

It uses huggingface_hub, which finds the token (HF_TOKEN, `hf auth login`) and the hub (HF_ENDPOINT) by itself.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urljoin

import httpx
from huggingface_hub import HfApi, constants, errors, get_hf_file_metadata, hf_hub_url, set_client_factory
from huggingface_hub.utils import build_hf_headers
from huggingface_hub.utils._http import default_client_factory

from vlmflow.config.source import HubSource
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import UNFINISHED
from vlmflow.core.patience import PASSING_STATUS, PassingFault, asked_wait, patiently
from vlmflow.fetch.transport import Refused, host_of, limit_answers

TIMEOUT = 30.0
"""Seconds to wait for an answer about a file or a repository."""

LONGEST_ANSWER = 100_000_000
"""Bytes of the hub's answer to a question: for each file of a repository it has some hundreds."""

set_client_factory(lambda: limit_answers(default_client_factory(), LONGEST_ANSWER))

COMMIT = r"[0-9a-f]{40}"
DIGEST = r"[0-9a-f]{40}|[0-9a-f]{64}"

NO_HUB = (
    "check this machine's network, its proxy (HTTPS_PROXY) and HF_ENDPOINT, then run the same command again: it "
    "resumes where it stopped; or set a path on this machine instead of the address (config: models, datasets)"
)
"""The next step if the hub could not be reached at all."""


@dataclass(frozen=True)
class HubFile:
    """One file of a repository at one commit.

    source: the address of the repository, or of the file itself in a data set.
    revision: the full commit.
    path: its name in the repository.
    size: bytes.
    etag: the SHA-256 of a file in LFS (64 hexadecimal digits), or else the SHA-1 of its git blob (40).
    """

    source: HubSource
    revision: str
    path: str
    size: int
    etag: str

    def __str__(self) -> str:
        return str(HubSource(self.source.repo_type, self.source.repo, self.path))

    @property
    def sha256(self) -> str | None:
        """The hub's SHA-256 of the file; None outside LFS."""
        return self.etag if len(self.etag) == 64 else None


def describe(source: HubSource, revision: str | None = None) -> tuple[str, list[HubFile]]:
    """Return a repository's commit (the given one, or else its newest) and all its files, sorted by name.

    Raises VlmflowError.
    """
    repo = HubSource(source.repo_type, source.repo, None)

    def ask() -> tuple[str, list[HubFile]]:
        with _in_our_words(str(repo), revision):
            info = HfApi().repo_info(
                repo.repo, repo_type=repo.repo_type, revision=revision, files_metadata=True, timeout=TIMEOUT
            )
            entries = [
                (file.rfilename, *((file.lfs.size, file.lfs.sha256) if file.lfs else (file.size, file.blob_id)))
                for file in getattr(info, "siblings", None) or []
            ]
        commit = info.sha
        if not isinstance(commit, str) or not re.fullmatch(COMMIT, commit):
            raise _not_the_hub(str(repo))
        _require_commit(str(repo), commit, revision or commit)
        files = [_checked(source, commit, *entry) for entry in entries]
        return commit, sorted(files, key=lambda file: file.path)

    return patiently(str(repo), ask)


def look_up(source: HubSource, revision: str, path: str) -> tuple[HubFile, str]:
    """Ask once for a file at a commit; returns it with the address of its bytes.

    The address may be signed and short-lived: keep it out of logs and messages.

    Raises PassingFault for a temporary failure, VlmflowError for any other.
    """
    name = str(HubSource(source.repo_type, source.repo, path))
    with _in_our_words(name, revision):
        url = hf_hub_url(source.repo, path, repo_type=source.repo_type, revision=revision)
        metadata = get_hf_file_metadata(url, timeout=TIMEOUT)
    if metadata.commit_hash is None:
        raise _not_the_hub(name)
    _require_commit(name, metadata.commit_hash, revision)
    return _checked(source, revision, path, metadata.size, metadata.etag), urljoin(url, metadata.location)


def address_of(file: HubFile) -> str:
    """Return the address of a file's bytes now; raises as `look_up` does."""
    return look_up(file.source, file.revision, file.path)[1]


def headers_for(address: str) -> dict[str, str]:
    """Return the headers of a download, with the token only if the address is the hub's own."""
    own = _origin(address) == _origin(constants.ENDPOINT)
    return {**build_hf_headers(token=None if own else False), "accept-encoding": "identity"}


def _origin(address: str) -> tuple[str, str, int | None]:
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise Refused("refused", f"not a valid address: {error}") from None
    return url.scheme, url.host, url.port


def _checked(source: HubSource, revision: str, path: object, size: object, etag: object) -> HubFile:
    """Refuse a name that must not become a path, and a digest that cannot be checked: a server is not trusted."""
    parts = path.split("/") if isinstance(path, str) else []
    sound = all(part not in ("", ".", "..") and part.isprintable() for part in parts)
    if not isinstance(path, str) or not sound or path.endswith(UNFINISHED):
        raise VlmflowError(f"{source}: the hub names a file {path!r}", "do not use this repository")
    if type(size) is not int or size < 0 or not isinstance(etag, str) or not re.fullmatch(DIGEST, etag):
        file = HubSource(source.repo_type, source.repo, path)
        raise VlmflowError(
            f"{file}: the hub gives size {size!r} and digest {etag!r}, which cannot be checked",
            "check HF_ENDPOINT: a mirror must send the hub's own headers",
        )
    return HubFile(source, revision, path, size, etag)


def _require_commit(name: str, answered: str, revision: str) -> None:
    if answered != revision:
        raise VlmflowError(
            f"{name}: asked for commit {revision}, the hub returned {answered}",
            "check the revision in pins.yaml, and HF_ENDPOINT (a mirror may be outdated)",
        )


def _not_the_hub(name: str) -> VlmflowError:
    return VlmflowError(
        f"{name}: {host_of(constants.ENDPOINT)} does not answer like a hub",
        "check HF_ENDPOINT, and whether a proxy or a login page answers instead",
    )


@contextmanager
def _in_our_words(name: str, revision: str | None) -> Iterator[None]:
    """Convert huggingface_hub's errors; their texts hold addresses and whatever the server wrote."""
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise VlmflowError(f"{name}: HF_HUB_OFFLINE forbids access to the hub", "unset it for this stage") from None
    except errors.HFValidationError:
        step = "use hf://OWNER/NAME or hf://datasets/OWNER/NAME/FILE"
        raise VlmflowError(f"{name} is not a valid name on the hub", step) from None
    except errors.HfHubHTTPError as error:
        raise _refusal(error, name, revision) from None
    except httpx.TooManyRedirects:
        raise VlmflowError(f"{name}: the hub's redirects form a loop", "check HF_ENDPOINT and proxies") from None
    except httpx.HTTPError as error:
        raise broken_off(error, constants.ENDPOINT) from None
    except (AttributeError, KeyError, TypeError, ValueError, httpx.InvalidURL):
        raise _not_the_hub(name) from None


def broken_off(error: Exception, address: str) -> PassingFault:
    """Convert an error of httpx; its own text may hold the address, which may be signed."""
    reason = f"{type(error).__name__} at {host_of(address)}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return PassingFault(reason, next_step=NO_HUB)
    return PassingFault(reason)


def _refusal(error: errors.HfHubHTTPError, name: str, revision: str | None) -> VlmflowError | PassingFault:
    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return VlmflowError(
            f"{name} is gated, and its owner has not granted access ({status})",
            "accept its terms on its page on the hub, then set your token: HF_TOKEN or `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return VlmflowError(f"{name}: there is no commit {revision}", "check the revision in pins.yaml")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return VlmflowError(f"{name}: there is no such file at {revision}", "check the address and the revision")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return VlmflowError(
            f"{name}: the hub does not have it, or not for this token ({status})",
            "check the address; if it is private or gated, set a token for it: HF_TOKEN or `hf auth login`",
        )
    if status in PASSING_STATUS:
        return PassingFault(f"{host_of(constants.ENDPOINT)} answers {status}", asked_wait(error.response.headers))
    return PassingError(f"{name}: the hub answers {status}", "run the same command again later")
