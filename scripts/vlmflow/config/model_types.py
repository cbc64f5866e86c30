"""ms-swift's kinds of models (`model_type`), from its own registry: architectures, parts, templates, published models.

No other module names a kind of model, or a part of one. `tools/make_swift_names.py` writes the table, because an import
of ms-swift takes seconds, and the data image does not have it.
"""

import datetime
import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator

from vlmflow.core.files import read_json

TABLE = Path(__file__).with_name("model_types.json")

QUANTISED = re.compile(r"(-(fp8|awq|gptq|bnb|unsloth|nf4|mxfp4|nvfp4|int[48]|[48]bits?|dynamic))+$", re.IGNORECASE)
"""What the names of quantised models end with, beside the name of the model that was quantised."""

AUTO = "auto"
"""What the configuration has in place of a kind that the model's address says."""

TEMPLATE = "template"
"""ms-swift's argument for the chat template, among a run's swift_args."""

BaseChat = Literal["chatml", "plain"]
"""Ways to write a conversation for a model that was trained on none."""


def _day(value: Any) -> datetime.date:
    """Return a day out of YAML; a number would be seconds, and a year below 1000 would be written without zeros."""
    try:
        day = datetime.date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        day = None
    if type(day) is not datetime.date or day.year < 1000:
        raise ValueError(f"{value!r:.40} is not a date; write it as 2024-07-26")
    return day


Day = Annotated[datetime.date, BeforeValidator(_day)]
"""A date for `models.NAME.date`."""

ModelPart = Literal["vision_tower", "aligner", "language_model"]
"""The parts of a model that sees, as ms-swift names them; the aligner joins the other two."""


class ModelType(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of models.

    architectures: the classes that are such models, as config.json names them. templates: its chat templates. template:
    the one that ms-swift takes by itself; null if it must be named. parts: for a model that sees, the modules of each
    part by their names in transformers. published: models on the Hugging Face hub (OWNER/NAME) that are of this kind,
    by their template. refused: why no run trains it; null if runs do.
    """

    architectures: list[str]
    templates: list[str] = []
    template: str | None = None
    parts: dict[ModelPart, list[str]] = {}
    published: dict[str, list[str]] = {}
    refused: str | None = None

    def part_of(self, name: str) -> ModelPart:
        """Return the part to which a module or tensor of a loaded model belongs; name: without peft's prefix."""
        modules = (
            (len(module), part) for part, names in self.parts.items() for module in names if _within(name, module)
        )
        return max(modules, default=(0, "language_model"))[1]


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@functools.cache
def model_types() -> dict[str, ModelType]:
    """Return all kinds by name."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, ModelType])


def check_model_type(name: str) -> str:
    """Return the name of a kind of models.

    Raises ValueError with the nearest names if ms-swift does not know it, or with the reason if no run trains it.
    """
    if name not in model_types() and name != AUTO:
        nearest = difflib.get_close_matches(name.replace("-", "_").lower(), model_types(), n=3, cutoff=0.6)
        others = f"nearest: {', '.join(nearest)}" if nearest else f"scripts/vlmflow/config/{TABLE.name} lists them"
        raise ValueError(f"ms-swift has no model_type {name!r}; {others}")
    if name != AUTO and (why := model_types()[name].refused):
        raise ValueError(f"{name} {why}; choose another model")
    return name


def model_types_for(architectures: Iterable[str]) -> list[str]:
    """Return the names of the kinds that are for one of some architectures, sorted."""
    wanted = set(architectures)
    return [name for name, kind in model_types().items() if wanted & set(kind.architectures)]


def kinds_of(folder: Path) -> list[ModelType]:
    """Return the kinds that a model may be of, by its config.json; [] if that names none. folder: the model's."""
    return [model_types()[name] for name in model_types_for(architectures_in(folder))]


def architectures_in(folder: Path) -> list[str]:
    """Return the architectures that a model's config.json names, as people may see them."""
    stated = read_json(folder / "config.json").get("architectures")
    return list(map(str, stated)) if isinstance(stated, list) else []


def published_type(repo: str) -> tuple[str, str] | None:
    """Return the kind and the chat template of a model on the hub; None if ms-swift lists it not. repo: OWNER/NAME."""
    for name, kind in model_types().items():
        for template, repos in kind.published.items():
            if repo in repos:
                return name, template
    return None


def unquantised(name: str) -> str | None:
    """Return the model on the hub (OWNER/NAME) that was quantised to the model of a name; None if none is listed.

    name: with or without its owner. The same owner's model comes first: many quantise what others publish.
    """
    owner, _, last = name.rpartition("/")
    if (plain := QUANTISED.sub("", last)) == last:
        return None
    listed = (repo for kind in model_types().values() for repos in kind.published.values() for repo in repos)
    models = sorted(repo for repo in listed if repo.rpartition("/")[2] == plain)
    return next((repo for repo in models if repo.startswith(f"{owner}/")), next(iter(models), None))
