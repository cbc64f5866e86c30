"""The settings of one run: model, data set, and how it is trained, gated and verified."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from vlmflow.config.settings import EXPONENT_FORM, Name, Number, Positive, Seed, Settings, Share
from vlmflow.config.strategies import DDP, STRATEGIES, meanings, names_on, strategy_of
from vlmflow.config.swift_args import check_argument, check_init_weights, check_template

TEXT_ARGS = (
    *("template", "template_backend", "use_chat_template", "agent_template", "system"),
    *("response_prefix", "enable_thinking", "preserve_thinking", "add_non_thinking_prefix"),
    *("disable_ignore_empty_think", "max_pixels", "norm_bbox"),
)
"""ms-swift's arguments (4.6, TemplateArguments) that change what a row's text and pictures become."""


class LoraSettings(Settings):
    """The adapter."""

    rank: Positive = 16
    """Rank r of the two factors A (r × in) and B (out × r)."""

    alpha: Annotated[Number, Field(gt=0)] = 32.0
    """The update is scaled by alpha / r (alpha / √r with rslora)."""

    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """Dropout on the adapter's input."""

    target_modules: Annotated[list[Annotated[str, Field(pattern=r"^[^-]")]], Field(min_length=1)] = ["all-linear"]
    """The layers that get an adapter: names, or all-linear for every linear layer that is not frozen."""

    freeze_vit: bool = True
    """Leave the vision tower as it is."""

    freeze_aligner: bool = True
    """Leave the layers between the vision tower and the language model as they are."""

    rslora: bool = False
    """Scale by alpha / √r (rank-stabilised LoRA, arXiv:2312.03732)."""

    dora: bool = False
    """Learn magnitude and direction separately (DoRA, arXiv:2402.09353)."""


class TrainSettings(Settings):
    """How a run trains; every value reaches ms-swift's command line, and a change starts the run from step 0."""

    epochs: Annotated[Number, Field(gt=0)] = 1.0
    """Passes over the train split; max_steps, if set, overrides it."""

    max_steps: Positive | None = None
    """Optimizer steps of the whole run."""

    learning_rate: Annotated[Number, Field(gt=0)] = 1e-4
    """The highest learning rate."""

    lr_scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    """How the learning rate decreases."""

    warmup_ratio: Share = 0.05
    """Share of the steps over which the learning rate rises from 0."""

    weight_decay: Annotated[Number, Field(ge=0)] = 0.1
    """AdamW's weight decay."""

    per_device_batch_size: Positive = 1
    """Rows per process and forward pass."""

    gradient_accumulation_steps: Positive = 8
    """Forward passes per optimizer step. Rows per step = processes × per_device_batch_size × this."""

    max_length: Positive = 8192
    """Tokens that a row may have, including picture tokens; over_long decides about longer rows.
    `lengths/RUN/summary.json` recommends a value that fits 99.9 % of the rows; the others need over_long, too."""

    image_max_tokens: Positive = 1024
    """Tokens that one picture may take (Qwen3-VL: one per 32 × 32 pixels); larger pictures are scaled down."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The type in which the weights are loaded and trained."""

    seed: Seed = 42
    """Seed of initialisation and data order."""

    checkpoint_steps: Positive = 100
    """Steps between two checkpoints."""

    evaluation_steps: Positive = 500
    """Steps between two evaluations on the val split; rounded up to a multiple of checkpoint_steps, because the result
    is the saved adapter with the lowest validation loss. The last step is always evaluated."""

    early_stop_after: Positive | None = None
    """End the training, as a success, after this many evaluations in a row without a new lowest validation loss; null
    trains to the last step."""

    keep_checkpoints: Annotated[int, Field(ge=2), EXPONENT_FORM] = 2
    """Working checkpoints kept in the run folder: the best and the newest."""

    gradient_checkpointing: bool = True
    """Trade time for memory: recompute activations in the backward pass."""

    attention: Literal["sdpa", "eager", "flash_attn"] = "sdpa"
    """The attention kernel; install flash_attn by hand (the package index has no wheel)."""

    dataloader_workers: Annotated[int, Field(ge=0), EXPONENT_FORM] = 4
    """Processes per trainer that load and scale pictures."""

    lora: LoraSettings = LoraSettings()

    swift_args: dict[Annotated[str, AfterValidator(check_argument)], str | int | float | bool] = {}
    """Further arguments of `swift sft`, with their whole names; one that the workflow sets itself, that would break the
    run, or that ms-swift does not know is refused."""

    @field_validator("swift_args")
    @classmethod
    def _values_are_known(cls, swift_args: dict[str, Any]) -> dict[str, Any]:
        if "template" in swift_args:
            check_template(str(swift_args["template"]))
        if "init_weights" in swift_args:
            check_init_weights(swift_args["init_weights"])
        return swift_args

    @property
    def evaluate_every(self) -> int:
        """Steps between two evaluations: evaluation_steps, rounded up to a multiple of checkpoint_steps."""
        return -(-self.evaluation_steps // self.checkpoint_steps) * self.checkpoint_steps

    @property
    def text_args(self) -> dict[str, str | int | float | bool]:
        """The part of swift_args that changes the text of a row, and so its length."""
        return {name: value for name, value in self.swift_args.items() if name in TEXT_ARGS}


class SmokeSettings(Settings):
    """The short run that must pass before the full run may start."""

    steps: Annotated[int, Field(ge=4), EXPONENT_FORM] = 20
    """Optimizer steps; at most those of the full run, and at least 4."""

    longest: Annotated[int, Field(ge=1), EXPONENT_FORM] = 16
    """How many of the longest rows it trains on: a run that survives them does not run out of memory later."""

    sample: Annotated[int, Field(ge=0), EXPONENT_FORM] = 48
    """How many further rows, drawn with the run's seed."""


class VerifySettings(Settings):
    """What is compared before the merged weights get their name."""

    logits: bool = True
    """Compare the logits of base + adapter and of the merged weights on real rows, on the run's device.
    Without it the proof is by tensors only, for models that do not fit in memory."""

    rows: Positive = 4
    """How many rows of the val split are compared."""


class ResourceSettings(Settings):
    """What the run's rules request from the machine or the cluster."""

    train_mem_mb: Positive = 65_536
    """Main memory of the training stages, in MB."""

    train_runtime: Positive = 2_880
    """Time limit of the full training, in minutes."""

    weights_mb: Positive = 20_000
    """Size of the model's weights on disk, in MB; the merged folder needs as much."""


class RunSettings(Settings):
    """One run: the name becomes `checkpoints/NAME` and `merged/NAME`."""

    model: Name
    """A name under `models`."""

    dataset: Name
    """A name under `datasets`."""

    device: Literal["cuda", "cpu"] = "cuda"
    """The device for training and verification."""

    processes: Positive = 1
    """Parallel trainers, one GPU each on cuda."""

    strategy: Annotated[
        Literal[*STRATEGIES],  # type: ignore[valid-type]  # the names of a table
        Field(description=meanings()),
    ] = DDP.name

    over_long: Literal["refuse", "leave_out", "shorten"] = "refuse"
    """What to do with rows of more than train.max_length tokens, before a GPU is requested. refuse: the run stops and
    names them. leave_out: they are not trained; `fitted/RUN/over_long.jsonl` names each. shorten (timestep form only):
    their oldest attempts are dropped until they fit, and those that never fit are left out. No row is cut."""

    cached_dataset: bool = False
    """Let ms-swift read all rows and pictures once, in a pod without GPUs, and train from the result. It is worthwhile
    when every length is needed before the first step: with the swift_args packing or group_by_length, each start would
    read all pictures (for a text model, tokenize all rows) while the GPUs wait."""

    train: TrainSettings = TrainSettings()
    smoke: SmokeSettings = SmokeSettings()
    verify: VerifySettings = VerifySettings()
    resources: ResourceSettings = ResourceSettings()

    @model_validator(mode="after")
    def _strategy_trains_on_the_device(self) -> Self:
        devices = strategy_of(self.strategy).devices
        if self.device not in devices:
            instead = ", ".join(names_on(self.device))
            raise ValueError(
                f"strategy {self.strategy} needs device {' or '.join(devices)}; on {self.device} use {instead}"
            )
        return self
