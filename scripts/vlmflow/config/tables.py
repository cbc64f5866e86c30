"""Reads and checks the repository's tables that people edit (pins.yaml, picture_sources.yaml).

The table of sources on the hub: revision, size and digest by address, in `pins.yaml`.

The table of picture sources: addresses, layouts, sizes and licences, in `picture_sources.yaml`.

For an archive on the hub, pins.yaml has the commit and the SHA-256 (`config.tables`).
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

import pydantic
import yaml
from pydantic import BeforeValidator, Field, model_validator

from vlmflow import CHECKOUT
from vlmflow.config.faults import say_faults
from vlmflow.config.settings import EXPONENT_FORM, Positive, Settings
from vlmflow.config.source import HubSource, files_of, parse_source
from vlmflow.config.yaml_file import read_yaml
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file

Table = TypeVar("Table")


def read_table(path: Path, kind: pydantic.TypeAdapter[Table]) -> Table:
    """Read a YAML file as a table of type `kind`; an empty file is an empty table.

    Raises VlmflowError with one line per error: file, row, key, value, and what is allowed.
    """
    table = read_yaml(path) or {}
    try:
        return kind.validate_python(table)
    except pydantic.ValidationError as error:
        raise VlmflowError(
            say_faults(error, kind.json_schema(), table, [path]), f"correct these keys in {path}"
        ) from None


PINS = CHECKOUT / "pins.yaml"
"""The repository's own table."""


class Pin(Settings):
    """The revision, size and digest of one data file or model; None if unknown."""

    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """The full commit of its repository."""

    size: Annotated[int, Field(ge=0)] | None = None
    """Bytes of the file; of a model, of all its files together."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the file; of a model, the result of `model_folder.digest_of` for its files."""


_PINS_TABLE = pydantic.TypeAdapter(dict[str, Annotated[Pin, BeforeValidator(lambda row: {} if row is None else row)]])


class _Dumper(yaml.SafeDumper):
    """Writes None as an empty value."""


_Dumper.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", ""))


def read_pins(path: Path) -> dict[str, Pin]:
    """Read the table: pins by address ("hf://datasets/OWNER/NAME/FILE", "hf://OWNER/NAME").

    A row for several files (`train-*-of-00004.parquet`) becomes one pin for each of them.

    Raises VlmflowError with one line per error: file, address, key, value, and what is allowed.
    """
    table = read_table(path, _PINS_TABLE)
    pins = {file: pin for address, pin in table.items() for file in files_of(address)}
    for address in pins:
        try:
            source = parse_source(address)
        except VlmflowError as error:
            raise VlmflowError(f"{path}: {error.cause}", error.next_step) from None
        if not isinstance(source, HubSource):
            raise VlmflowError(
                f"{path}: {address!r} is not a hub address", "remove the row: only hub addresses are pinned"
            )
        if source.revision:
            raise VlmflowError(f"{path}: {address!r} contains its revision", "move it to the key revision")
    return pins


def write_pins(path: Path, pins: Mapping[str, Pin]) -> None:
    """Write the table; keep the comments above its first row."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first_row = next((number for number, line in enumerate(lines) if line.strip() and line[0] != "#"), len(lines))
    rows: dict[str, Any] = {address: pin.model_dump() for address, pin in pins.items()}
    with whole_file(path, "w") as file:
        file.write("".join(lines[:first_row]))
        yaml.dump(rows, file, Dumper=_Dumper, sort_keys=False, width=1000)


def pin_of(address: str, pins: Mapping[str, Pin]) -> Pin | None:
    """Return the revision that an address itself names, as a pin; else its row in the table, or None if it has none."""
    source = parse_source(address) if address.startswith("hf://") else None
    revision = source.revision if isinstance(source, HubSource) else None
    return Pin(revision=revision) if revision else pins.get(address)


def revision_of(address: str, path: Path = PINS) -> str | None:
    """Return the revision to which an address itself or the table pins it; None for other addresses and local paths.

    A stage depends only on the revision: it has the same content when its size or digest is filled in later.

    Raises VlmflowError as `read_pins` does.
    """
    pin = pin_of(address, read_pins(path))
    return pin.revision if pin else None


PICTURE_SOURCES = CHECKOUT / "picture_sources.yaml"
"""The repository's own table."""

FORMS = {".zip": "zip", ".tar": "tar", ".tar.gz": "tar", ".tgz": "tar", ".parquet": "parquet"}
"""The form of an archive, by the end of its address."""

WEB = ("http://", "https://")


class PictureSource(Settings):
    """One source of pictures: a row of picture_sources.yaml, or overrides of it; null keeps the table's value."""

    members: dict[str, str] | None = None
    """By the beginning of the rows' paths, the name in the archive: `{rest}` is the path after that beginning, `{name}`
    its last part. The longest beginning wins."""

    archive: str | None = None
    """The .zip, .tar, .tar.gz or .parquet that holds them: https://…, http://…, or hf://datasets/OWNER/NAME/FILE,
    pinned in pins.yaml; `*` in a .parquet FILE matches several files."""

    one_by_one: str | None = None
    """The address (https://… or http://…), up to the name in the archive, of single pictures; a source may have only
    this, without an archive."""

    size: Annotated[int, Field(ge=1, le=2**53), EXPONENT_FORM] | None = None
    """Bytes of the archive."""

    md5: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    """MD5 of the archive, if its owner gives one."""

    pictures: Positive | None = None
    """Pictures in the archive."""

    picture_column: str | None = None
    """Parquet: the column of the pictures; `image` by default."""

    name_column: str | None = None
    """Parquet: the column with their names; by default, the name in the picture column."""

    licence: str | None = None
    """The licence, as its owner names it; the model card lists it for the pictures with this path. A changed licence
    publishes every run with pictures again, in seconds."""

    by_hand: str | None = None
    """How to get them by hand: the workflow does not fetch them, and reports this text."""

    @model_validator(mode="after")
    def _members_are_patterns(self) -> Self:
        for beginning, pattern in (self.members or {}).items():
            if set("{}") & set(pattern.replace("{rest}", "").replace("{name}", "")) or not pattern:
                raise ValueError(
                    f"members: {pattern!r} (of {beginning!r}) is not allowed; it must be the name in the archive, in "
                    "which only {rest} and {name} are in braces"
                )
        return self

    @model_validator(mode="after")
    def _addresses_are_readable(self) -> Self:
        for key, address in (("archive", self.archive), ("one_by_one", self.one_by_one)):
            if address and address.startswith(WEB) and "@" in urlsplit(address).netloc:
                raise ValueError(f"{key}: must not hold a user name or password: logs and outputs show addresses")
        if self.archive is not None:
            if not self.archive.startswith(WEB) and not isinstance(_parsed(self.archive), HubSource):
                raise ValueError(f"archive: {self.archive!r} must begin with https://, http:// or hf://datasets/")
            if self.form is None:
                raise ValueError(f"archive: {self.archive!r} must end with one of {', '.join(FORMS)}")
        if self.one_by_one is not None and not self.one_by_one.startswith(WEB):
            raise ValueError(f"one_by_one: {self.one_by_one!r} must begin with https:// or http://")
        return self

    @property
    def lacks(self) -> str | None:
        """The missing key without which this source is unusable, and what it must be; None if nothing is missing.

        A source that overrides another may lack keys; the result may not.
        """
        if not self.members:
            return "members: missing; it must be a block with at least one beginning of the rows' paths"
        if not (self.archive or self.one_by_one or self.by_hand or self.licence):
            return "archive: missing; set it, or one_by_one, by_hand or licence"
        return None

    @property
    def form(self) -> str | None:
        """The form of the archive: zip, tar or parquet; None without an archive, or for another ending."""
        return next((form for end, form in FORMS.items() if (self.archive or "").lower().endswith(end)), None)


_SOURCES_TABLE = pydantic.TypeAdapter(dict[str, PictureSource])


def read_sources(over: Mapping[str, PictureSource], path: Path = PICTURE_SOURCES) -> dict[str, PictureSource]:
    """Read the table, and let the configuration's sources override it key by key.

    over: the configuration's sources, by name. One with an address also removes the table's `by_hand`.

    Raises VlmflowError with one line per error: file, source, key, value, and what is allowed.
    """
    sources = read_table(path, _SOURCES_TABLE)
    for name, source in over.items():
        laid_over = {key: value for key, value in source if value is not None}
        if source.archive or source.one_by_one:
            laid_over.setdefault("by_hand", None)
        sources[name] = sources.get(name, PictureSource()).model_copy(update=laid_over)
    lacking = [
        f"{f'picture_sources.{name}' if name in over else f'{path}: {name}'}.{source.lacks}{_nearest(name, sources)}"
        for name, source in sources.items()
        if source.lacks
    ]
    if lacking:
        raise VlmflowError("\n".join(lacking), "correct it; docs/config.md (picture_sources.NAME) lists every key")
    return sources


def _nearest(name: str, sources: Mapping[str, PictureSource]) -> str:
    """Return the end of a message on an incomplete source: the complete one with the most similar name, if any."""
    nearest = difflib.get_close_matches(name, [other for other in sources if not sources[other].lacks], n=1)
    return f"; nearest known source: {nearest[0]}" if nearest else ""


def _parsed(address: str) -> object:
    try:
        return parse_source(address)
    except VlmflowError as error:
        raise ValueError(f"archive: {error.cause}") from None
