"""The folder that a server loads: links to a model's files, with a run's picture limits in the processor's file."""

from pathlib import Path

from vlmflow.config.tuners import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_folder
from vlmflow.pictures.budget import PictureBudget


def link_served(model: Path, folder: Path, most_tokens: int, adapter: Path | None = None) -> None:
    """Make the folder from which a model is served.

    model: the model's files: a base model's folder of links, or merged/RUN.
    folder: the folder to make; one that exists is replaced.
    most_tokens: the run's train.image_max_tokens, also for the base model: its answers are compared with the run's.
    adapter: the folder of an adapter (checkpoints/RUN/full) that transformers puts upon the model as it loads it.

    Raises VlmflowError if the model has no config.json, or the adapter lacks a file.
    """
    # Snakemake's mark and desktops' files begin with a dot.
    sources = {
        file.relative_to(model): file for file in sorted(model.rglob("*")) if file.is_file() and file.name[0] != "."
    }
    if Path("config.json") not in sources:
        raise VlmflowError(f"{model}: has no config.json, so it is not a model", "name the folder of a whole model")
    if adapter is not None:
        sources |= {Path(name): adapter / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        if missing := [source for source in sources.values() if not source.is_file()]:
            raise VlmflowError(f"{missing[0]}: is missing", "train the run with a tuner that makes an adapter")
    budget = PictureBudget.of(model, most_tokens)
    processor, limits = budget.processor, budget.limits
    with whole_folder(folder) as part:
        for name, source in sources.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            if processor and limits and str(name) == processor.file:
                (part / name).write_bytes(processor.limited(limits))
            else:
                (part / name).symlink_to(source.resolve())
