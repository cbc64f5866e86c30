"""The settings of one run: model, data set, and how it is trained, gated and verified."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from vlmflow.config import gpus
from vlmflow.config.after_training import AnswerSettings, ChosenBy, EvaluateSettings, TrackSettings
from vlmflow.config.deepspeed_json import check_deepspeed
from vlmflow.config.gpus import GPUS
from vlmflow.config.model_types import ModelPart
from vlmflow.config.settings import EXPONENT_FORM, MOST, Count, Name, Number, Positive, Seed, Settings, Share
from vlmflow.config.strategies import DDP, LORA, STRATEGIES, TUNERS, meanings_of, names_on, strategy_of, tuner_of
from vlmflow.config.swift_args import TEXT_ARGS, check_argument, check_init_weights, check_template, check_value

FLASH_ATTENTION = ("flash_attention_2", "flash_attention_3")

EVALUATIONS = 10
"""Evaluations that a run has by default, if it has so many steps: of a single one nothing can be chosen."""

LONGEST_SAVED, LONGEST_EVALUATED = 100, 500
"""The most steps between two checkpoints, and between two evaluations, by default."""


class LoraSettings(Settings):
    """The adapter, of the tuners lora and qlora."""

    rank: Positive = 16
    """Rank r of the two factors A (r × in) and B (out × r)."""

    alpha: Annotated[Number, Field(gt=0, le=10**6)] = 32.0
    """The update is scaled by alpha / r (alpha / √r with rslora)."""

    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """Dropout on the adapter's input. With experts the default is 0, and no other value is possible."""

    target_modules: Annotated[list[Annotated[str, Field(pattern=r"^[^-]")]], Field(min_length=1)] = ["all-linear"]
    """The layers that get an adapter: names, or all-linear for every linear layer that is not frozen (train.freeze)."""

    experts: bool = False
    """Adapt the experts of each layer too, in a model that has some; without it they get no adapter. Not with dora, nor
    with the tuner qlora."""

    rslora: bool = False
    """Scale by alpha / √r (rank-stabilised LoRA, arXiv:2312.03732)."""

    dora: bool = False
    """Learn magnitude and direction separately (DoRA, arXiv:2402.09353)."""

    @model_validator(mode="before")
    @classmethod
    def _experts_have_no_dropout(cls, given: Any) -> Any:
        unset = isinstance(given, dict) and given.get("experts") is True and "dropout" not in given
        return {**given, "dropout": 0.0} if unset else given

    @model_validator(mode="after")
    def _experts_are_adapted_plainly(self) -> Self:
        if self.experts and self.dropout:
            raise ValueError(
                f"dropout: {self.dropout} is not possible with experts: true, whose adapters have none; remove dropout"
            )
        if self.experts and self.dora:
            raise ValueError("dora: not possible with experts: true; remove one of them")
        return self


class QuantisationSettings(Settings):
    """How the tuner qlora quantises the frozen model (bitsandbytes, arXiv:2305.14314)."""

    type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit type: nf4 has its values where normally distributed weights are."""

    double: bool = True
    """Quantise the scales of the blocks too: 0.37 bit less per weight."""


ROWS_OF_A_STEP = ("per_device_batch_size", "gradient_accumulation_steps")
"""What `rows_per_step` stands in place of."""


class TrainSettings(Settings):
    """How a run trains; a change of a value that reaches ms-swift's command line starts the run from step 0."""

    epochs: Annotated[Number, Field(gt=0, le=10**6)] = 1.0
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
    """Rows per process and forward pass, where micro_batch_tokens is null."""

    gradient_accumulation_steps: Positive = 8
    """Forward passes per optimizer step. Rows per step = nodes × processes × per_device_batch_size × this."""

    rows_per_step: Positive | None = None
    """Rows of an optimizer step over all processes, in place of per_device_batch_size and gradient_accumulation_steps.
    A multiple of the processes."""

    micro_batch_tokens: Positive | Literal["auto"] | None = "auto"
    """Each step's rows are cut into as few forward passes (micro-batches) of at most so many tokens as are fast; a
    longer row has one of its own. They stand in one sequence without padding, where the model allows it. Rows and order
    of the steps stay the same. auto: the smoke run finds the largest number that fits the GPU. null, and auto on the
    CPU, with group_by_length or with sequence_parallel: per_device_batch_size rows per forward pass."""

    max_length: Positive = 8192
    """Tokens that a row may have, including picture tokens; over_long decides about longer rows.
    `lengths/RUN/summary.json` recommends a value that fits 99.9 % of the rows; the others need over_long, too."""

    image_max_tokens: Annotated[int, Field(ge=4, le=MOST), EXPONENT_FORM] = 1024
    """Tokens that one picture may take (Qwen3-VL: one per 32 × 32 pixels); larger pictures are scaled down, or cut into
    fewer tiles. `measure_lengths` says where a model allows no limit. At least 4, to which Qwen-VL's small pictures are
    scaled up."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The type in which the weights are loaded and trained."""

    seed: Seed = 42
    """Seed of initialisation and data order."""

    checkpoint_steps: Positive | None = None
    """Steps between two checkpoints. null: 100, or fewer in a run that is evaluated more often."""

    evaluation_steps: Positive | None = None
    """Steps between two evaluations on the val split; rounded up to a multiple of checkpoint_steps, because the result
    is the saved adapter with the lowest validation loss. The last step is always evaluated. null: a tenth of the run's
    steps, at most 500, and a multiple of checkpoint_steps if that is set."""

    early_stop_after: Positive | None = None
    """End the training, as a success, after this many evaluations in a row without a new lowest validation loss; null
    trains to the last step."""

    hang_minutes: Annotated[Number, Field(gt=0, lt=30)] = 20
    """Minutes without a forward pass on any process after which the training counts as hanging: the stacks of all
    processes go into the trainer's log, and it resumes once. Below 30, after which processes that wait for others fail.
    A change does not start the run again."""

    keep_checkpoints: Annotated[int, Field(ge=2, le=MOST), EXPONENT_FORM] = 2
    """Working checkpoints kept in the run folder: the best and the newest."""

    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Trade time for memory: recompute activations in the backward pass. auto: with micro_batch_tokens: auto, the smoke
    run chooses what is faster; otherwise true."""

    attention: Literal["sdpa", "eager", *FLASH_ATTENTION] = "sdpa"  # type: ignore[valid-type]  # names of a table
    """The attention kernel. Models that have no sdpa, such as gpt-oss, attend eagerly under this name. Those of flash
    attention are experimental and need packages that the locked environment does not have: docs/training.md."""

    group_by_length: bool = False
    """Give all processes rows of similar length at each step, so that none waits for the longest."""

    liger: bool = False
    """Use Liger's kernels: less memory for logits. Experimental; needs the package liger-kernel and a C compiler."""

    sequence_parallel: Positive = 1
    """How many processes share each row. Experimental; needs flash attention."""

    dataloader_workers: Count = 4
    """Processes per trainer that load and scale pictures."""

    freeze: list[ModelPart] = ["vision_tower", "aligner"]
    """The parts of the model that stay as they are. aligner: the layers between the vision tower and the language
    model."""

    lora: LoraSettings = LoraSettings()
    quantisation: QuantisationSettings = QuantisationSettings()

    swift_args: dict[Annotated[str, AfterValidator(check_argument)], str | int | float | bool] = {}
    """Further arguments of `swift sft`, with their whole names; allowed are those that change neither what the model
    reads nor which tokens are trained, and those of the chat template, which is compared with the model's own
    ([training.md](training.md))."""

    @field_validator("swift_args")
    @classmethod
    def _values_are_known(cls, swift_args: dict[str, Any]) -> dict[str, Any]:
        for name, value in swift_args.items():
            check_value(name, value)
        if "template" in swift_args:
            check_template(str(swift_args["template"]))
        if "init_weights" in swift_args:
            check_init_weights(swift_args["init_weights"])
        return swift_args

    @model_validator(mode="after")
    def _rows_of_a_step_are_given_once(self) -> Self:
        given = [key for key in ROWS_OF_A_STEP if key in self.model_fields_set]
        if self.rows_per_step and given:
            raise ValueError(f"rows_per_step: give it, or {' and '.join(given)}")
        return self

    @model_validator(mode="after")
    def _planned_rows_are_not_shared_or_grouped(self) -> Self:
        plain = "group_by_length" if self.group_by_length else "sequence_parallel" if self.sequence_parallel > 1 else ""
        if plain and isinstance(self.micro_batch_tokens, int):
            raise ValueError(f"micro_batch_tokens: not with {plain}; remove one of them")
        return self

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        if set(self.freeze) == set(get_args(ModelPart)):
            raise ValueError(f"freeze: {', '.join(self.freeze)} are all parts of the model; nothing would be trained")
        return self

    @model_validator(mode="after")
    def _shared_rows_have_flash_attention(self) -> Self:
        if self.sequence_parallel > 1 and self.attention not in FLASH_ATTENTION:
            raise ValueError(
                f"sequence_parallel: {self.sequence_parallel} needs attention {' or '.join(FLASH_ATTENTION)}, not "
                f"{self.attention}"
            )
        return self

    def on_device(self, device: str, processes: int) -> Self:
        """Return the settings with values in place of words: rows_per_step, and `auto` where nothing is to be found.

        processes: those of all nodes. Raises ValueError if rows_per_step is not a multiple of them.
        """
        plain = device == "cpu" or self.group_by_length or self.sequence_parallel > 1
        tokens = None if plain and self.micro_batch_tokens == "auto" else self.micro_batch_tokens
        changes: dict[str, Any] = {"micro_batch_tokens": tokens}
        if self.gradient_checkpointing == "auto" and tokens != "auto":
            changes["gradient_checkpointing"] = True
        if self.rows_per_step:
            passes, rest = divmod(self.rows_per_step * self.sequence_parallel, processes)
            if rest:
                raise ValueError(
                    f"rows_per_step: {self.rows_per_step} is not a multiple of the {processes} processes"
                    + (f" / sequence_parallel {self.sequence_parallel}" if self.sequence_parallel > 1 else "")
                )
            changes |= {"rows_per_step": None, "gradient_accumulation_steps": passes}
        return self.model_copy(update=changes)

    def scheduled(self, steps: int) -> Self:
        """Return the settings of a run of so many steps: checkpoint_steps and evaluation_steps are numbers."""
        tenth = max(1, steps // EVALUATIONS)
        if self.evaluation_steps or self.checkpoint_steps:
            saved = self.save_every
        else:  # parts of the way to an evaluation
            saved = min(tenth, LONGEST_EVALUATED)
            saved //= -(-saved // LONGEST_SAVED)
        longest = -(-LONGEST_EVALUATED // saved) * saved
        evaluated = self.evaluation_steps or min(longest, max(saved, tenth // saved * saved))
        return self.model_copy(update={"checkpoint_steps": saved, "evaluation_steps": evaluated})

    @property
    def save_every(self) -> int:
        """Steps between two checkpoints; before `scheduled`, those of a long run."""
        return self.checkpoint_steps or min(LONGEST_SAVED, self.evaluation_steps or LONGEST_SAVED)

    @property
    def evaluate_every(self) -> int:
        """Steps between two evaluations: evaluation_steps, rounded up to a multiple of checkpoint_steps."""
        return -(-(self.evaluation_steps or LONGEST_EVALUATED) // self.save_every) * self.save_every

    @property
    def text_args(self) -> dict[str, str | int | float | bool]:
        """The part of swift_args that changes the text of a row, and so its length."""
        return {name: value for name, value in self.swift_args.items() if name in TEXT_ARGS}


class SmokeSettings(Settings):
    """The short run that must pass before the full run may start."""

    steps: Annotated[int, Field(ge=4, le=MOST), EXPONENT_FORM] = 20
    """Optimizer steps; at most those of the full run, and at least 4."""

    longest: Positive = 16
    """How many of the longest rows it trains on: a run that survives them does not run out of memory later."""

    sample: Count = 48
    """How many further rows, drawn with the run's seed."""


class VerifySettings(Settings):
    """What is compared before the merged weights get their name."""

    logits: bool = True
    """Compare the logits of base + adapter (tuner full: those that the trainer stored) and of the merged weights on
    real rows, on the run's device. Without it the proof is by tensors only, for models that do not fit in memory."""

    rows: Positive = 4
    """How many rows of the val split are compared; with tuner full, the trainer stores 8."""


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

    nodes: Positive = 1
    """Machines that train together: on a cluster as many pods, each with `processes` trainers and the run's resources.
    Without a cluster all of them are on this machine, to see what happens."""

    processes: Positive = 1
    """Parallel trainers on each node, one GPU each on cuda."""

    strategy: Annotated[
        Literal[*STRATEGIES],  # type: ignore[valid-type]  # the names of a table
        Field(description=meanings_of(STRATEGIES)),
    ] = DDP.name

    deepspeed: Annotated[dict[str, Any], AfterValidator(check_deepspeed)] | None = None
    """DeepSpeed's settings, as in its JSON, for strategy: deepspeed. Batch sizes, accumulation, clipping and the type
    follow from the run: leave them out, or write "auto"."""

    tuner: Annotated[
        Literal[*TUNERS],  # type: ignore[valid-type]  # the names of a table
        Field(description=meanings_of(TUNERS)),
    ] = LORA.name

    experimental: bool = False
    """Allow what no test proves to the end (train, kill, resume, merge, verify): a pair of tuner and strategy that
    docs/training.md does not list, flash attention, Liger's kernels, sequence_parallel. The log and the model card say
    so."""

    gpu: Annotated[
        Literal[*GPUS] | None,  # type: ignore[valid-type]  # the names of a table
        Field(description=gpus.meaning()),
    ] = None

    gpu_hour_price: Annotated[Number, Field(ge=0, le=10**8)] | None = None
    """What one such GPU costs for an hour, in any currency; the estimate then shows the price of the run."""

    network_gbit: Annotated[Number, Field(gt=0, le=10**6)] = 100
    """What a node sends to the others at most, in Gbit per second, over all of its network cards: for the estimate of a
    run on several nodes. 100 is an assumption, one card of a common kind. `vlmflow doctor` measures what one GPU of
    each node reaches, in GB per second; times 8 that is Gbit."""

    estimate: Literal["check", "ignore"] = "check"
    """What follows from the estimate of the memory on `gpu`, before a GPU is requested. check: a warning above 90 % of
    the GPU's memory, and the run stops above 110 %. ignore: it starts in any case."""

    over_long: Literal["refuse", "leave_out", "shorten"] = "refuse"
    """What to do with rows of more than train.max_length tokens, before a GPU is requested. refuse: the run stops and
    names them. leave_out: they are not trained; `fitted/RUN/over_long.jsonl` names each. shorten (timestep form only):
    their oldest attempts are dropped until they fit, and those that never fit are left out. No row is cut. Of the half
    of val that judges, longer rows are left out of the evaluation, and counted there."""

    train: Annotated[TrainSettings, Field(validate_default=True)] = TrainSettings()
    smoke: SmokeSettings = SmokeSettings()
    verify: VerifySettings = VerifySettings()
    resources: ResourceSettings = ResourceSettings()

    evaluate: EvaluateSettings | None = None
    """Compare the tuned model with its base before `merged/NAME` is made, and show the result in its model card. null:
    `merged/NAME` says "not evaluated"; `eval/NAME/val` can be made all the same."""

    answer: AnswerSettings = AnswerSettings()

    chosen_by: ChosenBy | None = None
    """What chose these settings; `search/NAME/best.yaml` and `probably.yaml` set it. It is named in
    `provenance.json` and the model card, and changes nothing else."""

    track: TrackSettings | None = None
    """Send the finished run to trackers: `tracked/NAME.json`."""

    @field_validator("train")
    @classmethod
    def _words_have_their_values(cls, train: TrainSettings, run: ValidationInfo) -> TrainSettings:
        known = run.data
        if not {"device", "nodes", "processes"} <= known.keys():  # one of them has its own error
            return train
        return train.on_device(known["device"], known["nodes"] * known["processes"])

    @model_validator(mode="after")
    def _settings_are_those_that_were_chosen(self) -> Self:
        if self.chosen_by:
            self.chosen_by.refuse_others(self.train)
        return self

    @model_validator(mode="after")
    def _traces_are_of_evaluated_rows(self) -> Self:
        if self.track and self.track.otlp and not self.evaluate:
            raise ValueError("track.otlp gets a trace for each evaluated row: add evaluate: {}, or remove track.otlp")
        return self

    @model_validator(mode="after")
    def _price_is_of_a_product(self) -> Self:
        if self.gpu_hour_price is not None and self.gpu is None:
            raise ValueError("gpu_hour_price is the price of one GPU of a product: set gpu too")
        return self

    @model_validator(mode="after")
    def _only_a_quantising_tuner_has_its_settings(self) -> Self:
        if "quantisation" in self.train.model_fields_set and not tuner_of(self.tuner).quantises:
            quantising = ", ".join(name for name, tuner in TUNERS.items() if tuner.quantises)
            raise ValueError(
                f"train.quantisation: tuner {self.tuner} does not quantise; set tuner: {quantising}, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_not_quantised(self) -> Self:
        if self.train.lora.experts and tuner_of(self.tuner).quantises:
            raise ValueError(
                f"train.lora.experts: tuner {self.tuner} cannot quantise experts; set tuner: {LORA.name}, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _strategy_trains_on_the_device(self) -> Self:
        devices = strategy_of(self.strategy).devices
        if self.device not in devices:
            instead = ", ".join(names_on(self.device))
            raise ValueError(
                f"strategy {self.strategy} needs device {' or '.join(devices)}; on {self.device} use {instead}"
            )
        return self

    @model_validator(mode="after")
    def _kernels_have_a_gpu(self) -> Self:
        kernels = [self.train.attention] if self.train.attention in FLASH_ATTENTION else []
        kernels += ["liger"] if self.train.liger else []
        if kernels and self.device == "cpu":
            raise ValueError(f"train: not on device cpu: {' and '.join(kernels)}; remove it, or set device: cuda")
        return self

    @model_validator(mode="after")
    def _experiments_are_allowed(self) -> Self:
        untested = experiments(self.tuner, self.strategy, self.train)
        if untested and not self.experimental:
            raise ValueError(
                f"experimental, because no test proves it: {'; '.join(untested)} (set experimental: true in the run to "
                "train it all the same)"
            )
        return self

    @property
    def evaluation(self) -> EvaluateSettings:
        """How the run is evaluated, with or without a block of its own."""
        return self.evaluate or EvaluateSettings()

    @property
    def compared_rows(self) -> int:
        """Rows on which the tuned model is compared with its base before it is published."""
        return self.evaluate.rows * len(self.evaluate.splits) if self.evaluate else 0

    @property
    def ranks(self) -> int:
        """All parallel trainers, on all nodes."""
        return self.nodes * self.processes

    @model_validator(mode="after")
    def _parallel_processes_share_rows_evenly(self) -> Self:
        if self.processes % self.train.sequence_parallel:
            raise ValueError(
                f"train.sequence_parallel: {self.train.sequence_parallel} does not divide processes: {self.processes}"
            )
        return self

    @model_validator(mode="after")
    def _settings_fit_the_strategy(self) -> Self:
        taking = [name for name, strategy in STRATEGIES.items() if strategy.takes_json]
        if self.deepspeed is None and self.strategy in taking:
            raise ValueError(f"deepspeed: missing; strategy {self.strategy} needs DeepSpeed's settings there")
        if self.deepspeed is not None and self.strategy not in taking:
            raise ValueError(
                f"deepspeed: strategy {self.strategy} does not use it; set strategy: {', '.join(taking)}, or remove it"
            )
        shared = ((self.deepspeed or {}).get("zero_optimization") or {}).get("zero_hpz_partition_size")
        if isinstance(shared, int) and shared and self.processes % shared:
            raise ValueError(
                f"deepspeed.zero_optimization.zero_hpz_partition_size: {shared} does not divide processes: "
                f"{self.processes}, so a copy of the weights would be on two nodes"
            )
        return self


def experiments(tuner: str, strategy: str, train: TrainSettings) -> list[str]:
    """Return what is experimental in a run, for people: [] if all of it is supported."""
    parts = []
    if strategy not in (supported := tuner_of(tuner).strategies):
        parts.append(f"tuner {tuner} with strategy {strategy} (supported: {', '.join(supported)})")
    if train.attention in FLASH_ATTENTION:
        parts.append(f"train.attention {train.attention}")
    if train.lora.experts and tuner_of(tuner).trains_adapter and strategy != DDP.name:
        parts.append(f"train.lora.experts with strategy {strategy}")
    if train.liger:
        parts.append("train.liger")
    if train.sequence_parallel > 1:
        parts.append(f"train.sequence_parallel {train.sequence_parallel}")
    return parts
