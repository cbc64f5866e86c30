"""The base models of the configuration: where each is, and of which kind, as ms-swift names it."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from vlmflow.config.model_types import (
    AUTO,
    TEMPLATE,
    BaseChat,
    Day,
    ModelType,
    check_model_type,
    model_types,
    published_type,
)
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import Settings
from vlmflow.config.source import HubSource, base_run, parse_source
from vlmflow.config.swift_args import check_template

TESTED = (
    *("qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
    *("llama", "mistral", "mixtral", "mistral3", "phi3", "phi4", "glm4", "glm4_moe"),
    *("gemma2", "gemma3_text", "gemma3_vision", "gpt_oss", "polylm"),
    *("internvl", "llava1_5_hf", "llava_onevision_hf"),
)
"""The kinds that tests train, merge and prove, each with a small model of its architecture.

It is here, because what stages import makes them stale (harness/staleness.py).
"""


TEMPLATE_FOR: dict[str, str] = {"chatml": "chatml", "plain": "default"}
"""ms-swift's template for each of them."""


ANY = ModelType([])
"""A kind that is not known yet."""


class ModelSettings(Settings):
    """One base model."""

    source: str
    """hf://OWNER/NAME (pinned in pins.yaml, or with its commit: hf://OWNER/NAME@COMMIT), file:///PATH, or the path of a
    local folder, which is used in place. Only its data is used (docs/design.md, A model is data). merged/RUN: the
    weights of another run of the configuration, which is made first; their origin stays in `provenance.json`, the model
    card and `vlmflow verify`."""

    model_type: Annotated[str, AfterValidator(check_model_type)] = AUTO
    """ms-swift's name of the kind of the model. auto: that of a model on the hub that ms-swift lists; for merged/RUN
    that of the run's own model; for others the one for the architecture in its config.json. If several are, the one
    with a chat template that writes what the model's own one does."""

    template: Literal["auto"] | Annotated[str, AfterValidator(check_template)] = AUTO
    """ms-swift's name of the chat template. auto: that of a model on the hub that ms-swift lists, or the only one of
    the kind, or of several the one that writes what the model's own chat template does; `measure_lengths` stops with
    the candidates if none or two do. `template` in a run's swift_args wins."""

    chat_template: BaseChat | None = None
    """The chat template that a base model gets, which has none of its own: chatml writes the marks <|im_start|> and
    <|im_end|>, plain the lines `### Human:` and `### Assistant:`. The training and the merged folder use the same."""

    date: Day | None = None
    """The date (2024-07-26) that a chat template writes in place of today's: in the training, and in the merged
    folder's template. By default the one that the template has for programs without a clock, or 2025-01-01. It is
    refused if the template writes no date."""

    stop_tokens: list[str] = []
    """Tokens at which the model stops, in addition to those of its own `generation_config.json`: a base model stops at
    the end of a text, and the training ends answers with another token (Qwen3-8B-Base: <|im_end|>). `measure_lengths`
    stops with the token if it is missing. The merged folder has them too."""

    template_differs: bool = False
    """Whether the run goes on where the model's own chat template, which servers use, gives rows other tokens than the
    training. `measure_lengths` compares every row; the model card tells the difference."""

    dequantize: bool = False
    """Whether the model is in FP8 (`quant_method` fp8 in its config.json: E4M3, with a scale for each block or matrix),
    and becomes bfloat16 once: each number times its scale in float32, rounded to nearest, as transformers does on CPUs.
    All stages see only that base, and `provenance.json` has the digests of both. Models in FP8 are refused without it,
    all others with it."""

    @property
    def untested(self) -> str | None:
        """What to say of a kind of model that no test has taken to proven weights; None for others."""
        if self.model_type in (AUTO, *TESTED):
            return None
        return (
            f"model_type: {self.model_type}: no test has taken such a model to proven weights; the smoke run shows "
            f"whether it trains and merges (tested: {', '.join(TESTED)})"
        )


def name_kinds(models: dict[str, ModelSettings], runs: dict[str, RunSettings]) -> None:
    """Put the kind of each model, and the chat template of each run, in the place of `auto`, as if they were written.

    A run gets a template only if ms-swift would not take it by itself. What the addresses of models do not say stays
    AUTO: stages find it in the models' files (`swift.template_texts`). Raises ValueError with the key of a model that
    no run can train.
    """
    for name, model in models.items():
        kind, template = _kind_and_template(f"models.{name}.model_type", model, models, runs)
        models[name] = model.model_copy(update={"model_type": kind, "template": template})
    for name, run in runs.items():
        model, args = models[run.model], run.train.swift_args
        own = model_types()[model.model_type].template if model.model_type != AUTO else None
        if TEMPLATE in args or model.template in (AUTO, own):
            continue
        train = run.train.model_copy(update={"swift_args": {TEMPLATE: model.template, **args}})
        runs[name] = run.model_copy(update={"train": train})


def _kind_and_template(
    where: str, model: ModelSettings, models: dict[str, ModelSettings], runs: dict[str, RunSettings]
) -> tuple[str, str]:
    """Return what is written for a model, or what its address says; AUTO for what neither does."""
    known: tuple[str, str] | None
    if (base := base_run(model.source)) is not None:
        kind, template = _kind_and_template(where, models[runs[base].model], models, runs)
        known = kind, str(runs[base].train.swift_args.get(TEMPLATE, template))
    else:
        source = parse_source(model.source)
        known = published_type(source.repo) if isinstance(source, HubSource) else None
    kind = known[0] if known and model.model_type == AUTO else model.model_type
    described = model_types().get(kind, ANY)
    if why := described.refused:
        raise ValueError(f"{where}: auto: {model.source} is a {kind}, which {why}; choose another model")
    if model.chat_template and described.parts:
        raise ValueError(
            f"{where.removesuffix('model_type')}chat_template: {model.chat_template} is for text, and a {kind} sees "
            "pictures; use a model with its own chat template"
        )
    if model.template != AUTO:
        return kind, model.template
    if model.chat_template:
        return kind, TEMPLATE_FOR[model.chat_template]
    return kind, known[1] if known and known[0] == kind else described.template or AUTO
