"""A training: its data, model and settings, ms-swift's arguments, and the digest that names its run folder.

As JSON, node 0 tells the other nodes of it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

import msgspec

from vlmflow.config.deepspeed_json import check_deepspeed
from vlmflow.config.model_types import check_model_type
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import LORA, Choices, Strategy, Tuner, strategy_of, tuner_of
from vlmflow.fetch.placed import read_model_manifest, read_small_files
from vlmflow.rows.training_data import TrainingData

DDP_TIMEOUT = 1800
"""Seconds after which a process that waits for others fails; with ms-swift's 208 days a hang would keep its GPUs."""

CALLBACK = "vlmflow"
"""A name among those of ms-swift's callbacks; `in_trainer.process` registers our callbacks under it."""


Target = Annotated[str, msgspec.Meta(pattern="^[^-]")]
"""A name that ms-swift takes for no argument."""


@dataclass(frozen=True)
class BaseModel:
    """The base model: the folder with the weights, ms-swift's name of the architecture, the digest of the files."""

    folder: Path
    model_type: str
    digest: str

    @classmethod
    def read(cls, model: Path, model_type: str) -> Self:
        """Read the base model from `models/NAME`, which `fetch_model` made.

        Raises VlmflowError if its files have changed.
        """
        manifest = read_model_manifest(model)
        return cls(manifest.folder, model_type, manifest.digest)

    @classmethod
    def without_weights(cls, model_files: Path, model_type: str) -> Self:
        """Read the base model from `model_files/NAME`: enough to encode rows, not to train. Its digest is empty.

        Raises VlmflowError if its files have changed.
        """
        return cls(read_small_files(model_files), model_type, "")


@dataclass(frozen=True)
class Passes:
    """What a smoke run finds for `auto`: see the settings of these names."""

    micro_batch_tokens: Annotated[int, msgspec.Meta(ge=1)]
    gradient_checkpointing: bool


class Targets(msgspec.Struct, frozen=True):
    """What gets an adapter, where a model with experts decides (`adapter_targets`).

    modules: layers, in place of `train.lora.target_modules`. parameters: those of experts, and the weights of layers
    that peft would take for experts.
    """

    modules: list[Target]
    parameters: list[Target]


@dataclass(frozen=True)
class Training:
    """A complete training. device: "cuda" or "cpu". nodes: machines; processes: the trainers on each.

    stop_at: the optimizer step, a multiple of `settings.evaluate_every`, after which the training stops; None trains to
    the last step. hours: how long trainers may run from each start on; None: without a limit. Neither is part of the
    digest: with a larger value the training goes on, as if it had not stopped.
    passes: what the smoke run found for the settings' word `auto`. The digest holds the word: the training is the same
    on a GPU of another size.
    targets: what gets an adapter, if not what the settings say.
    """

    data: TrainingData
    model: BaseModel
    settings: TrainSettings
    device: str
    processes: int
    strategy: Strategy
    tuner: Tuner = LORA
    nodes: int = 1
    stop_at: int | None = None
    hours: float | None = None
    passes: Passes | None = None
    targets: Targets | None = None

    @property
    def micro_batch_tokens(self) -> int | None:
        """The tokens of a micro-batch, as set or as found; None for a fixed number of rows."""
        set_to = self.settings.micro_batch_tokens
        return set_to if isinstance(set_to, int) else self.passes.micro_batch_tokens if self.passes else None

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activations are computed again, as set or as found."""
        set_to = self.settings.gradient_checkpointing
        return set_to if isinstance(set_to, bool) else self.passes is None or self.passes.gradient_checkpointing

    @property
    def pads_rows(self) -> bool:
        """Whether a micro-batch's rows are filled up to the longest; otherwise they stand in one sequence."""
        return self.settings.attention == "eager" or not self.data.one_sequence

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step over all trainers; with sequence parallelism several share each."""
        settings = self.settings
        data_parallel_ranks = self.ranks // settings.sequence_parallel
        return data_parallel_ranks * settings.per_device_batch_size * settings.gradient_accumulation_steps

    @property
    def ranks(self) -> int:
        """All trainers, on all nodes."""
        return self.nodes * self.processes

    def digest(self) -> str:
        """Return 16 hexadecimal digits that change with the data, the model and every setting, but not with paths.

        It does not change with the nodes either: a training resumes when its trainers are on other machines.
        """
        tokens = self.settings.micro_batch_tokens
        words = {} if tokens is None else {"passes": [tokens, self.settings.gradient_checkpointing]}
        meaning = {
            "data": self.data.digest,
            "model": self.model.digest,
            "arguments": replace(self, passes=None).arguments(),
            **words,
            "processes": self.ranks,
            "device": self.device,
            "image_max_tokens": self.settings.image_max_tokens,
            "early_stop_after": self.settings.early_stop_after,
        }
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]

    def describe(self) -> dict[str, object]:
        """Return what the digest covers, for a file beside the run folder's checkpoints."""
        return {
            "data": {"digest": self.data.digest, "train": str(self.data.train), "val": str(self.data.val)},
            "model": asdict(self.model) | {"folder": str(self.model.folder)},
            "nodes": self.nodes,
            "processes": self.processes,
            "device": self.device,
            "tuner": self.tuner.name,
            "strategy": self.strategy.name,
            "deepspeed": self.strategy.deepspeed,
            "settings": self.settings.model_dump(mode="json"),
        }

    def arguments(self) -> list[str]:
        """Return ms-swift's arguments (`swift sft`, 4.6) without those that are paths."""
        return as_words({**self._values(), **dict(sorted(self.settings.swift_args.items()))})

    def _values(self) -> dict[str, object]:
        settings = self.settings
        length = {"max_steps": settings.max_steps} if settings.max_steps else {"num_train_epochs": settings.epochs}
        cpu = {"use_cpu": True} if self.device == "cpu" else {}
        # Without use_cpu, two CPU processes each train their own copy, and end with code 0.
        return {
            "model_type": self.model.model_type,
            **self.tuner.arguments,
            **(self._adapter() if self.tuner.trains_adapter else {}),
            **(self._quantisation() if self.tuner.quantises else {}),
            "freeze_vit": "vision_tower" in settings.freeze,
            "freeze_aligner": "aligner" in settings.freeze,
            "freeze_llm": "language_model" in settings.freeze,
            **self._types(),
            "attn_impl": settings.attention,
            # ms-swift's defaults. They stay explicit: a run's digest covers its arguments, and would change without.
            "padding_free": False,
            "packing": False,
            "group_by_length": settings.group_by_length,
            "use_liger_kernel": settings.liger,
            "sequence_parallel_size": settings.sequence_parallel,
            **length,
            "learning_rate": settings.learning_rate,
            "lr_scheduler_type": settings.lr_scheduler,
            "warmup_ratio": settings.warmup_ratio,
            "weight_decay": settings.weight_decay,
            "per_device_train_batch_size": settings.per_device_batch_size,
            "per_device_eval_batch_size": settings.per_device_batch_size,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "max_length": settings.max_length,
            "truncation_strategy": "delete",  # with strict an error: no row and no picture is cut
            "strict": True,  # otherwise a random row replaces a broken or over-long one
            "dataset_shuffle": False,  # rows keep their numbers; the trainer's sampler shuffles in each epoch
            "loss_scale": self.data.loss_scale,
            "seed": settings.seed,
            "data_seed": settings.seed,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": settings.evaluate_every,
            "save_strategy": "steps",
            "save_steps": settings.save_every,
            "save_total_limit": settings.keep_checkpoints,
            "metric_for_best_model": "loss",  # the best checkpoint is kept, not loaded into the trainers
            "greater_is_better": False,
            "gradient_checkpointing": self.gradient_checkpointing,
            "dataloader_num_workers": settings.dataloader_workers,
            "dataloader_pin_memory": self.device == "cuda",
            "ddp_backend": "nccl" if self.device == "cuda" else "gloo",
            "ddp_timeout": DDP_TIMEOUT,
            **cpu,
            **self.strategy.arguments_for(Choices(settings.dtype, self.gradient_checkpointing)),
            "check_model": False,  # it would use the network
            "add_version": False,  # it would add a folder named after the time
            "report_to": "tensorboard",
            "callbacks": CALLBACK,
        }

    def _adapter(self) -> dict[str, object]:
        lora = self.settings.lora
        targets = self.targets or Targets(lora.target_modules, [])
        return {
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": targets.modules,
            **({"target_parameters": targets.parameters} if targets.parameters else {}),
            "use_rslora": lora.rslora,
            "use_dora": lora.dora,
        }

    def _quantisation(self) -> dict[str, object]:
        return {
            "bnb_4bit_quant_type": self.settings.quantisation.type,
            "bnb_4bit_use_double_quant": self.settings.quantisation.double,
            "bnb_4bit_compute_dtype": self.settings.dtype,
        }

    def _types(self) -> dict[str, object]:
        """The type in which the weights are loaded, and that in which most operations compute.

        If the model's own weights are trained in 16 bit and the strategy keeps no float32 copies of them, they are
        loaded in float32. Both flags are always given: for float32 ms-swift would compute in float16 on a GPU
        (arguments/base_args/model_args.py, `_init_mixed_precision`).
        """
        dtype = self.settings.dtype
        in_float32 = not self.tuner.trains_adapter and not self.strategy.keeps_masters
        return {
            "torch_dtype": "float32" if in_float32 else dtype,
            "bf16": dtype == "bfloat16",
            "fp16": dtype == "float16",
        }


def as_words(values: dict[str, object]) -> list[str]:
    """Return ms-swift's arguments as words of a command line.

    A text that begins with a dash is joined to its name (`--name=-text`); alone it would be another argument.
    """
    return [word for name, value in values.items() for word in _with_name(f"--{name}", _words(value))]


def _with_name(name: str, words: list[str]) -> list[str]:
    return [f"{name}={words[0]}"] if len(words) == 1 and words[0].startswith("-") else [name, *words]


def _words(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


class _Strategy(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    deepspeed: dict[str, Any] | None


BY_NAME = {"device": Literal["cuda", "cpu"], "strategy": _Strategy, "tuner": str}
"""The fields of a `Training` that are other types in a launch file."""

Fields = msgspec.defstruct(
    "Fields", [*(get_type_hints(Training, include_extras=True) | BY_NAME).items()], forbid_unknown_fields=True
)
"""The fields of a `Training` in a launch file."""


def as_data(training: Training) -> dict[str, Any]:
    """Return a training as JSON's own types, for the other nodes: with absolute places, and names in place of code."""
    strategy = _Strategy(training.strategy.name, training.strategy.deepspeed)
    named = vars(training) | {"strategy": strategy, "tuner": training.tuner.name}
    return dict(msgspec.to_builtins(named, enc_hook=_encode))


def from_data(data: dict[str, Any]) -> Training:
    """Return the training of `as_data`. Raises ValueError if a value is not one that a configuration may have."""
    fields = msgspec.structs.asdict(msgspec.convert(data, Fields, dec_hook=_decode))
    check_model_type(fields["model"].model_type)
    name, deepspeed = msgspec.structs.astuple(fields["strategy"])
    strategy = strategy_of(name, deepspeed and check_deepspeed(deepspeed))
    return Training(**fields | {"strategy": strategy, "tuner": tuner_of(fields["tuner"])})


def _encode(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, TrainSettings) else str(value.absolute())


def _decode(kind: type, value: Any) -> Any:
    if kind is TrainSettings:
        return TrainSettings.model_validate(value)
    if not isinstance(value, str) or not Path(value).is_absolute():
        raise ValueError(f"{value!r:.200}: not an absolute path")
    return Path(value)
