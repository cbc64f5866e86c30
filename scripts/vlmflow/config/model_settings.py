"""The base models of the configuration: where each is, and of which kind, as ms-swift names it."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from vlmflow.config.model_types import (
    AUTO,
    architectures_in,
    check_model_type,
    model_types,
    model_types_for,
    published_type,
)
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import Settings
from vlmflow.config.source import HubSource, base_run, parse_source
from vlmflow.config.swift_args import check_template
from vlmflow.core.errors import VlmflowError

TEMPLATE = "template"
"""ms-swift's argument for the chat template, among a run's swift_args."""

TESTED = (
    *("qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
    *("llama", "mistral", "mixtral", "mistral3", "gemma2", "gemma3_text", "gemma3_vision", "phi3", "phi4", "glm4"),
    *("gpt_oss", "internvl", "llava1_5_hf", "llava_onevision_hf"),
)
"""The kinds that tests train, merge and prove, each with a small model of its architecture.

It is here, because what stages import makes them stale (harness/code_digest.py).
"""


class ModelSettings(Settings):
    """One base model."""

    source: str
    """hf://OWNER/NAME (pinned in pins.yaml, or with its commit: hf://OWNER/NAME@COMMIT), file:///PATH, or the path of a
    local folder, which is used in place. Only its data is used (docs/design.md, A model is data). merged/RUN: the
    weights of another run of the configuration, which is made first; their origin stays in `provenance.json`, the model
    card and `make verify`."""

    model_type: Annotated[str, AfterValidator(check_model_type)] = AUTO
    """ms-swift's name of the kind of the model. auto: that of a model on the hub that ms-swift lists; for merged/RUN
    that of the run's own model. For others, such as a local folder, write the name."""

    template: Literal["auto"] | Annotated[str, AfterValidator(check_template)] = AUTO
    """ms-swift's name of the chat template. auto: that of a model on the hub that ms-swift lists, or the only one of
    the kind; a local folder whose kind has several needs the name. `template` in a run's swift_args wins."""

    template_differs: bool = False
    """Whether the run goes on where the model's own chat template, which servers use, gives rows other tokens than the
    training. `measure_lengths` compares some rows of every run; the model card tells the difference."""

    @property
    def untested(self) -> str | None:
        """What to say of a kind of model that no test has taken to proven weights; None for others."""
        if self.model_type in TESTED:
            return None
        return (
            f"model_type: {self.model_type}: no test has taken such a model to proven weights; the smoke run shows "
            f"whether it trains and merges (tested: {', '.join(TESTED)})"
        )


def name_kinds(models: dict[str, ModelSettings], runs: dict[str, RunSettings]) -> None:
    """Put the kind of each model, and the chat template of each run, in the place of `auto`, as if they were written.

    A run gets a template only if ms-swift would not take it by itself. Raises ValueError with the key if one is not
    known.
    """
    for name, model in models.items():
        kind, template = _kind_and_template(f"models.{name}.model_type", model, models, runs)
        models[name] = model.model_copy(update={"model_type": kind, "template": template})
    for name, run in runs.items():
        model, args = models[run.model], run.train.swift_args
        known = model_types()[model.model_type]
        if TEMPLATE in args or model.template == known.template:
            continue
        if model.template == AUTO:
            raise ValueError(
                f"models.{run.model}.template: auto: {model.model_type} has several; write the one that the model was "
                f"trained with: {', '.join(known.templates)}"
            )
        train = run.train.model_copy(update={"swift_args": {TEMPLATE: model.template, **args}})
        runs[name] = run.model_copy(update={"train": train})


def _kind_and_template(
    where: str, model: ModelSettings, models: dict[str, ModelSettings], runs: dict[str, RunSettings]
) -> tuple[str, str]:
    """Return what is written for a model, or what its address says; the template may still be AUTO."""
    known: tuple[str, str] | None
    if (base := base_run(model.source)) is not None:
        kind, template = _kind_and_template(where, models[runs[base].model], models, runs)
        known = kind, str(runs[base].train.swift_args.get(TEMPLATE, template))
    else:
        source = parse_source(model.source)
        known = published_type(source.repo) if isinstance(source, HubSource) else None
        if model.model_type == AUTO and known is None:
            raise ValueError(f"{where}: auto: {_how_to_name(source)}")
    kind = known[0] if known and model.model_type == AUTO else model.model_type
    if why := model_types()[kind].refused:
        raise ValueError(f"{where}: auto: {model.source} is a {kind}, which {why}; choose another model")
    if model.template != AUTO:
        return kind, model.template
    return kind, known[1] if known and known[0] == kind else model_types()[kind].template or AUTO


def _how_to_name(source: HubSource | Path) -> str:
    """Return what to do about a model whose kind is not known by its address."""
    if isinstance(source, HubSource):
        return f"ms-swift does not list {source.repo}; write the model_type of a model with the same architecture"
    fitting: list[str] = []
    with suppress(VlmflowError):  # the folder may be on a disk that this machine does not see, and is checked later
        fitting = model_types_for(architectures_in(source))
    return f"{source} is a folder; write its model_type" + (f": {' or '.join(fitting)}" if fitting else "")
