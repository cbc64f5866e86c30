"""The base of the configuration's model: strict keys, and the types of numbers and names."""

from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

_OF_NO_TYPE = object()
"""No field accepts it."""


class Settings(BaseModel):
    """One block of the configuration: unknown keys are refused, attribute docstrings become docs/config.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_nothing_else(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse true and false in fields of other types; Python would accept them as the numbers 1 and 0."""
        assert field.field_name is not None
        allowed = cls.model_fields[field.field_name].annotation
        kinds = [allowed, *get_args(allowed)]
        named = any(value is one for kind in kinds for one in get_args(kind))  # a Literal
        other = isinstance(value, bool) and bool not in kinds and not named
        return _OF_NO_TYPE if other else value


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
    """Return whether a text found outside of the configuration, as in a folder, could be a `Name`."""
    try:
        _NAMES.validate_python(text)
    except ValidationError:
        return False
    return True
