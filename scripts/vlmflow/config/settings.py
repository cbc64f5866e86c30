"""The base of the configuration's model: strict keys, and the types of numbers and names.

Values of the configuration and what is allowed for them, as messages show both.

Checks the address of a server in the configuration: an address alone, without a key or password in it.

The settings of rows and pictures, for the stages that check them.
"""

import re
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_core.core_schema import no_info_plain_validator_function

from vlmflow.config.raw_forms import ANY_ROW
from vlmflow.core.errors import VlmflowError

_OF_NO_TYPE = object()
"""No field accepts it."""


class Settings(BaseModel):
    """A block of the configuration: refuses unknown keys; attribute docstrings become docs/config.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        """Describe the keys by their docstrings: `use_attribute_docstrings` would read them in every process."""
        from pydantic._internal._docs_extraction import extract_docstrings_from_cls

        schema = handler(core)
        keys = handler.resolve_ref_schema(schema)["properties"]
        for base in filter(lambda base: issubclass(base, Settings), cls.__mro__):
            for key, text in extract_docstrings_from_cls(base, use_inspect=True).items():
                if field := cls.model_fields.get(key):
                    keys[field.alias or key].setdefault("description", text)
        return schema

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_nothing_else(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse true and false in fields of other types; Python would take them for 1 and 0."""
        assert field.field_name is not None
        allowed = cls.model_fields[field.field_name].annotation
        kinds = [allowed, *get_args(allowed)]
        named = any(value is literal for kind in kinds for literal in get_args(kind))  # a Literal
        other = isinstance(value, bool) and bool not in kinds and not named
        return _OF_NO_TYPE if other else value


class MissingSettingError(VlmflowError, AttributeError):
    """A stage reads a setting that it was not given."""


class _Part(Settings):
    declared: ClassVar[type[Settings]]

    def __getattr__(self, key: str) -> Any:
        if (field := self.declared.model_fields.get(key)) and not field.is_required():
            return field.get_default(call_default_factory=True)
        if isinstance(computed := getattr(self.declared, key, None), property) and computed.fget:
            return computed.fget(self)
        raise MissingSettingError(f"settings: {key} is missing", "name it in the rule or the option")


AnySettings = TypeVar("AnySettings", bound=Settings)


def part_of(model: type[AnySettings], values: Any) -> AnySettings:
    """Return settings with the given keys, each checked as `model` declares it.

    values: by name, of fields or properties. Rules name all that their stages read; from a shell, other fields
    have their defaults. Raises pydantic.ValidationError. Reading what has no default raises MissingSettingError.
    """
    types: dict[str, Any] = {}
    for key in values if isinstance(values, dict) else ():
        if key in model.model_fields:
            types[key] = model.model_fields[key].annotation, model.model_fields[key]
        elif isinstance(computed := getattr(model, key, None), property):
            types[key] = get_type_hints(computed.fget)["return"], ...
    made = create_model(model.__name__, __base__=_Part, **types)
    made.declared = model
    return made.model_validate(values)  # type: ignore[return-value]  # its keys are as declared


PartOf = Annotated[
    AnySettings,
    GetPydanticSchema(lambda model, _: no_info_plain_validator_function(partial(part_of, model))),
]
"""Settings of which a rule passes only the keys that its stage reads: others make nothing stale."""


def _integer(value: Any) -> Any:
    """Read "1e3" and 1e3 as 1000: YAML reads it as a string, the command line as a float."""
    if isinstance(value, int):
        return value
    try:
        number = float(value)
        return int(number) if number.is_integer() else value
    except (TypeError, ValueError, OverflowError):
        return value


EXPONENT_FORM = BeforeValidator(_integer)
"""Allows a whole number in exponent form; it must be last in an annotation, after the bounds."""

MOST = 10**9
"""The largest whole number of a setting: above any sensible one; floats hold it exactly."""

Positive = Annotated[int, Field(ge=1, le=MOST), EXPONENT_FORM]
"""A whole number of at least 1."""

Count = Annotated[int, Field(ge=0, le=MOST), EXPONENT_FORM]
"""A whole number of at least 0."""

Seed = Annotated[int, Field(ge=0, lt=2**32), EXPONENT_FORM]
"""The seed of random choices; every library accepts 32 bits."""

Number = Annotated[float, Field(allow_inf_nan=False)]
"""A finite number; pydantic takes "1e-4", which YAML reads as a string."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, 0 to 1."""


def _refuse_unfinished(name: str) -> str:
    if name.endswith(".part"):
        raise ValueError("a name must not end in .part, which marks unfinished folders")
    return name


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"), AfterValidator(_refuse_unfinished)]
"""A name that becomes part of file names: letters, digits, '.', '_' and '-', at most 100 of them."""

_NAMES = TypeAdapter(Name)


def is_name(text: str) -> bool:
    """Return whether a text from outside of the configuration, as a folder's, could be a `Name`."""
    try:
        _NAMES.validate_python(text)
    except ValidationError:
        return False
    return True


Schema = dict[str, Any]

TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
    "object": "a block of keys",
    "null": "null",
}

BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
    "pattern": "of the form",
}


def allowed(schema: Schema) -> str:
    """Return what a JSON Schema allows, as messages and the reference page put it."""
    if "$ref" in schema:
        return "a block, see below"
    if "anyOf" in schema:
        return " or ".join(allowed(branch) for branch in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join("true" if value is True else str(value) for value in schema["enum"])
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([TYPES.get(schema.get("type", ""), "something else"), *bounds])


def refuse_no_address(url: str, example: str, key: str) -> None:
    """Refuse what is no http(s) address, or holds more than one.

    example: of a good address. key: the environment variable in which a password or token belongs.

    Raises ValueError.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{url!r} is not an address such as {example}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"the address alone, without user, password or query; a key goes into {key}")


NOT_IN_COLUMNS = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
"""Characters that the name of a column must not contain: JSON would escape them, or cannot have them."""

GOOD = 8
"""The score from which an attempt is good: at 8, FIRE's own dialogues end (arXiv:2407.11522)."""


class PictureLimits(Settings):
    """Limits on pictures; rows with a picture outside these limits are rejected, and the reason is counted."""

    min_side: Annotated[int, Field(ge=17)] = 28
    """Shortest side in pixels. Below 17 (half a picture token of Qwen3-VL) transformers scales a picture otherwise than
    the trainer."""

    max_aspect: Annotated[Number, Field(ge=1, le=200)] = 200.0
    """Longest side over shortest side: Qwen-VL's processor refuses more than 200."""

    max_pixels: Annotated[int, Field(ge=1, le=178_956_970), EXPONENT_FORM] = 40_000_000
    """Width times height: a decompression bomb is refused by its header, before decoding. A pixel takes up to 18 bytes,
    and resolve_images and hash_pictures request memory for pictures of the default size on all cores: for larger ones,
    give both more (--set-resources resolve_images:mem_mb=16000). Above the largest allowed value, Pillow refuses the
    picture in the trainer."""

    max_bytes: Positive = 100_000_000
    """Size of the file in bytes."""


class RowLimits(Settings):
    """Limits on the size of rows, which keep one broken row from wasting a day of training."""

    max_turns: Annotated[int, Field(ge=2, le=MOST), EXPONENT_FORM] = 64
    """Turns in one conversation, of all speakers together; for FIRE, in a whole trajectory, in both forms."""

    max_turn_chars: Positive = 20_000
    """Characters in one turn, and in the declarations of a row's tools."""

    max_pictures: Positive = 16
    """Pictures in one row."""


Take = Literal["chosen", True] | None
"""Which answers of preference data are used: see `data_settings.DatasetSettings.take`."""


class RowChoice(Settings):
    """Which rows of a raw split are used; the others are counted as left out, and not checked further."""

    sources: list[str] | None = None
    """Allowed values of the rows' `source`; null for any."""

    samples: Annotated[int, Field(ge=1)] | None = None
    """How many of these rows, drawn by the seed; null for all."""

    seed: Seed = 0
    """Decides which rows are drawn."""

    modality: Literal["image", "text"] | None = None
    """image: rows with a picture; text: rows without; null for all."""

    names: dict[str, str] = {key: key for key in ANY_ROW}
    """The names of these keys in the file; a key that is not here is not read."""

    kind: str | None = None
    """The kind of the rows, if their turns may name pictures, too: `names` then has all of its keys."""

    take: Take = None
    """The answers of preference data that are used; see docs/data.md."""

    frames: int | None = None
    """See `data_settings.DatasetSettings.frames_as_pictures`."""

    read_columns: list[str] | None = None
    """The columns to read from a parquet file; null for all."""

    @property
    def takes_all(self) -> bool:
        """Whether all rows of the modality are used."""
        return self.sources is None and self.samples is None and self.take is not True


class NearDuplicates(Settings):
    """Pictures that look like one in the test split, and rows without a picture that ask nearly the same question."""

    picture_distance: Annotated[int, Field(ge=0, le=10), EXPONENT_FORM] = 4
    """Two pictures are near when their perceptual hashes differ in at most this many of 64 bits. Up to 4, they are the
    same picture, scaled or compressed differently; from 8 on, charts of one template are near."""

    drop: bool = False
    """Reject the train rows with such pictures or questions, like those with the test split's own pictures and
    prompts."""
