"""What the check needs of a machine's own Python, and what is missing."""

import importlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

NEEDED = {
    "torch": "all arithmetic",
    "torchvision": "the picture processor of transformers",
    "transformers": "the model",
    "accelerate": "loading a model onto a device",
    "peft": "the adapter",
    "safetensors": "weights on disk",
    "tokenizers": "the tokenizer",
    "jinja2": "the chat template",
    "PIL": "pictures",
    "numpy": "splitting raw rows",
    "msgspec": "reading rows",
    "pydantic": "settings",
    "psutil": "watching trainers",
}
"""Modules that the check and its parts of vlmflow import, and for what."""

DISTRIBUTIONS = {"PIL": "pillow"}
OLDEST_TRANSFORMERS = 5
"""The first version that knows the configuration's `rope_parameters`."""

OF_THE_MACHINE = ("torch", "torchvision")


def what_is_missing() -> list[str]:
    """Return a line, with the next step, for each module that does not import or is too old."""
    pins = _pins()
    lines, wanted = [], []
    for module, purpose in NEEDED.items():
        if fault := _fault(module):
            distribution = DISTRIBUTIONS.get(module, module)
            wanted.append(pins.get(distribution, distribution))
            step = "install the one made for this GPU" if module in OF_THE_MACHINE else f"pip install '{wanted[-1]}'"
            lines.append(f"{module} ({purpose}) {fault}: {step}")
    if wanted:
        words = " ".join(f"'{word}'" for word in wanted)
        lines.append(
            f"without network: elsewhere, pip download --only-binary=:all: --dest wheels {words}; then carry wheels/ "
            f"here, and pip install --no-index --find-links wheels {words}"
        )
    return lines


def _fault(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "is missing" if error.name == module else f"does not import: {error}"
    except Exception as error:  # a build that does not fit the other packages may fail in any way
        return f"does not import: {error}"
    if module == "transformers":
        version = importlib.metadata.version(module)
        if int(version.split(".")[0]) < OLDEST_TRANSFORMERS:
            return f"is {version}, {OLDEST_TRANSFORMERS} or newer is needed"
    return None


def _pins() -> dict[str, str]:
    """Return what the project itself installs, by name: {"msgspec": "msgspec==…"}."""
    groups = tomllib.loads(PROJECT.read_text())["dependency-groups"]
    requirements = [entry for group in groups.values() for entry in group if isinstance(entry, str)]
    return {re.split("[=><]", requirement)[0]: requirement for requirement in requirements}
