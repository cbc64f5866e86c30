"""The arguments of ms-swift that a run may set besides the workflow's own, and the names that ms-swift knows."""

import difflib
import functools
import math
import re
from pathlib import Path
from typing import Any

from vlmflow.config.strategies import DEEPSPEED, FSDP2, STRATEGIES, TUNERS, arguments_of
from vlmflow.config.yaml_file import shown
from vlmflow.core.files import read_json

TABLE = Path(__file__).with_name("swift_names.json")
"""Names of the locked ms-swift, by kind: arguments, templates. `tools/make_swift_names.py` writes it."""

SET_BY_THE_WORKFLOW = {
    **dict.fromkeys(arguments_of(STRATEGIES), "runs.NAME.strategy"),
    "model": "runs.NAME.model",
    "model_type": "models.NAME.model_type",
    "dataset": "runs.NAME.dataset",
    "val_dataset": "runs.NAME.dataset",
    "output_dir": "stores.runs",
    "resume_from_checkpoint": "resuming from the newest whole checkpoint",
    **dict.fromkeys(arguments_of(TUNERS), "runs.NAME.tuner"),
    "lora_rank": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    "target_modules": "train.lora.target_modules",
    "target_parameters": "train.lora.experts",
    "freeze_vit": "train.freeze",
    "freeze_aligner": "train.freeze",
    "freeze_llm": "train.freeze",
    "bnb_4bit_quant_type": "train.quantisation.type",
    "bnb_4bit_use_double_quant": "train.quantisation.double",
    "bnb_4bit_compute_dtype": "train.dtype",
    "use_rslora": "train.lora.rslora",
    "use_dora": "train.lora.dora",
    "torch_dtype": "train.dtype",
    "bf16": "train.dtype",
    "fp16": "train.dtype",
    "attn_impl": "train.attention",
    "padding_free": "train.micro_batch_tokens",
    "packing": "train.micro_batch_tokens",
    "group_by_length": "train.group_by_length",
    "use_liger_kernel": "train.liger",
    "sequence_parallel_size": "train.sequence_parallel",
    "max_steps": "train.max_steps",
    "num_train_epochs": "train.epochs",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.lr_scheduler",
    "warmup_ratio": "train.warmup_ratio",
    "weight_decay": "train.weight_decay",
    "per_device_train_batch_size": "train.per_device_batch_size",
    "per_device_eval_batch_size": "train.per_device_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "max_length": "train.max_length",
    "truncation_strategy": "its rule that no row is cut",
    "strict": "its rule that no row is replaced by another",
    "loss_scale": "datasets.NAME.train_on",
    "dataset_shuffle": "its record of each step's rows; the trainer shuffles in each epoch",
    "seed": "train.seed",
    "data_seed": "train.seed",
    "logging_steps": "its report, which lists every step",
    "eval_strategy": "train.evaluation_steps",
    "eval_steps": "train.evaluation_steps",
    "ddp_timeout": "half an hour, so that a hang ends",
    "save_strategy": "train.checkpoint_steps",
    "save_steps": "train.checkpoint_steps",
    "save_total_limit": "train.keep_checkpoints",
    "metric_for_best_model": "its choice of the best checkpoint",
    "greater_is_better": "its choice of the best checkpoint",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "dataloader_num_workers": "train.dataloader_workers",
    "dataloader_pin_memory": "runs.NAME.device",
    "ddp_backend": "runs.NAME.device",
    "use_cpu": "runs.NAME.device",
    "check_model": "training offline",
    "add_version": "stores.runs",
    "report_to": "its report and TensorBoard's files in the run folder",
    "callbacks": "its callback, which saves, compares and reports",
}
"""Arguments that the workflow sets, each with the key or the reason that decides its value."""

LOADS_SETTINGS = "it reads settings from another file; write them here"
SECRETS = "settings are printed, stored and published in provenance.json; put a token in the environment (HF_TOKEN)"
OTHER_ROWS = "no digest covers its rows, and no stage checks them; remove it, and set runs.NAME.dataset"
OF_PACKING = "it changes only packing, which no run uses; remove it: train.micro_batch_tokens plans each step's passes"

REFUSED: dict[str, str] = {
    "fsdp_config": f"the workflow sets it; to shard with FSDP, set runs.NAME.strategy: {FSDP2.name}",
    "zero_hpz_partition_size": f"set it in runs.NAME.deepspeed.zero_optimization (strategy: {DEEPSPEED.name})",
    "early_stop_interval": "the workflow would take its early end for an interruption; set train.early_stop_after",
    "warmup_steps": "ms-swift refuses it beside warmup_ratio, which the workflow sets; set train.warmup_ratio",
    "max_epochs": "it ends before the last step, which counts as interrupted; set train.epochs",
    "push_to_hub": "the trainer runs offline; upload merged/RUN yourself",
    "response_prefix": "the published chat template would not write it; write it into the rows' answers",
    "device_map": "each process trains on its own device; set runs.NAME.processes and runs.NAME.strategy",
    "max_pixels": "the published processor would not scale pictures so; set train.image_max_tokens",
    "rope_scaling": "the merged folder gets the base's config.json, without this change; set it in the base's",
    "hub_token": SECRETS,
    "swanlab_token": SECRETS,
    "swanlab_secret": SECRETS,
    "swanlab_webhook_url": SECRETS,
    "load_args": LOADS_SETTINGS,
    "load_data_args": LOADS_SETTINGS,
    "model_kwargs": "it overrides the environment variables that hold train.image_max_tokens; set that",
    "adapters": "it trains an adapter of another shape than train.lora gives, and no digest covers it; merge it, and "
    "use the result as the base",
    "new_special_tokens": "the merged folder gets the base's tokenizer, without these tokens; add them there",
    "columns": "rows already have ms-swift's keys; to rename the raw file's keys, set datasets.NAME.columns",
    "custom_dataset_info": "it renames keys and roles of rows, but they already have ms-swift's, and no digest covers "
    "its file; to rename the raw file's keys, set datasets.NAME.columns",
    "split_dataset_ratio": "the run already has a val split; set datasets.NAME.val_share",
    "cached_dataset": OTHER_ROWS,
    "cached_val_dataset": OTHER_ROWS,
    "packing_length": OF_PACKING,
    "packing_num_proc": OF_PACKING,
    "packing_strategy": OF_PACKING,
    "logging_dir": "TensorBoard's files must stay in the run folder; set stores.runs",
}
"""Arguments that are not allowed and have a better way, each with the reason and that way."""

TEXT_ARGS = (
    *("template", "agent_template", "system", "enable_thinking", "preserve_thinking", "add_non_thinking_prefix"),
    "disable_ignore_empty_think",
)
"""ms-swift's arguments (4.6, TemplateArguments) that change what a row's text becomes. `measure_lengths` compares it
with what the model's own chat template writes."""

ALLOWED = frozenset(
    (
        *("adam_beta1", "adam_beta2", "adam_epsilon", "aligner_lr", "vit_lr", "lorap_lr_ratio", "lr_scheduler_kwargs"),
        *(
            "max_grad_norm",
            "neftune_noise_alpha",
            "optim",
            "optim_args",
            "init_weights",
            "lora_bias",
            "modules_to_save",
        ),
        *("target_regex", "freeze_parameters", "freeze_parameters_ratio", "freeze_parameters_regex"),
        *("trainable_parameters", "trainable_parameters_regex", "bnb_4bit_quant_storage", "experts_impl", "tf32"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataset_num_proc", "lazy_tokenize"),
        *("load_from_cache_file", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters"),
        *("ddp_static_graph", "full_determinism", "gradient_checkpointing_kwargs", "vit_gradient_checkpointing"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "use_cache"),
        *("use_logits_to_keep", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "run_name"),
        *("logging_first_step", "logging_nan_inf_filter", "skip_memory_metrics"),
    )
)
"""Arguments that change neither what the model reads nor which tokens are trained: a test encodes rows with each."""

NOT_IN_ARGUMENTS = re.compile(r"[\0\ud800-\udfff]")
"""What no argument of a command may contain: it ends at the first, and half of a surrogate pair is not text."""

HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_weights that do not change the base's weights. The others (pissa, olora, corda, loftq, lora_ga)
subtract the first update from the base, so their adapter fits another base than the one on disk."""


def check_argument(name: str) -> str:
    """Return the name of an argument, if a run may set it.

    Raises ValueError with the reason if it may not: ms-swift does not know it, the workflow sets it, it would break the
    run, or nothing shows that the model is trained on what servers give it.
    """
    if name in SET_BY_THE_WORKFLOW:
        raise ValueError(f"the workflow sets this argument itself ({SET_BY_THE_WORKFLOW[name]}); remove it")
    if name in REFUSED:
        raise ValueError(REFUSED[name])
    if name not in names()["arguments"]:
        raise ValueError(f"`swift sft` has no such argument{_nearest(name, 'arguments')}")
    if name not in ALLOWED and name not in TEXT_ARGS:
        raise ValueError(
            "no test shows that it changes neither what the model reads nor what is trained; remove it "
            "(docs/training.md lists those that are allowed)"
        )
    return name


def check_value(name: str, value: str | int | float | bool) -> None:
    """Raise ValueError with name and value for a value that cannot be an argument of a command, or is no number."""
    if isinstance(value, str) and (match := NOT_IN_ARGUMENTS.search(value)):
        raise ValueError(f"{name}: {shown(value)} holds {match[0]!r}; no argument of a command can")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not allowed; it must be a finite number")


def check_template(name: str) -> str:
    """Return the name of a chat template; raises ValueError with the nearest names if ms-swift does not know it."""
    if name not in names()["templates"]:
        raise ValueError(f"template: ms-swift has no chat template {name!r}{_nearest(name, 'templates')}")
    return name


def check_init_weights(value: object) -> None:
    """Raise ValueError for a value of init_weights whose adapter the merge would refuse."""
    if {"true": True, "false": False}.get(str(value).lower(), value) not in HARMLESS_INITS:
        allowed = ", ".join(str(init).lower() for init in HARMLESS_INITS)
        raise ValueError(
            f"init_weights: {value!r} changes the base's weights, and the merge would refuse the adapter; "
            f"allowed: {allowed}"
        )


def _nearest(name: str, kind: str) -> str:
    nearest = difflib.get_close_matches(name.strip("-").replace("-", "_").lower(), names()[kind], n=3, cutoff=0.6)
    return f"; nearest: {', '.join(nearest)}" if nearest else f"; scripts/vlmflow/config/{TABLE.name} lists them"


@functools.cache
def names() -> dict[str, Any]:
    """Return the names that ms-swift knows, by kind (TABLE)."""
    table: dict[str, Any] = read_json(TABLE)
    return table
