"""Planned micro-batches train what one row per forward pass does: losses, gradients, adapters, resumed bytes."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiny_trainings import Tiny, train_and_kill
from trainer_faults import DEEPSPEED, FSDP2, before_trainers
from vlmflow.config.run_settings import SmokeSettings
from vlmflow.config.strategies import STRATEGIES, TUNERS
from vlmflow.core.account import write_account
from vlmflow.in_trainer.messages import BAD_STEP, Log, read_events, rows_of_step
from vlmflow.lengths.count import RowLength, read_lengths
from vlmflow.supervisor.plan import PLAN, kept_plan, plan_of, read_plan
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.smoke import choose_rows, find_passes, smoke_training
from vlmflow.supervisor.train import TooLargeError, Trained, TrainingFailedError, train
from vlmflow.swift.arguments import Passes, Training
from vlmflow.swift.row_attention import joins_rows, keep_rows_apart

COUNT_PASSES = """
if TRAINER:
    import os, transformers
    loss = transformers.Trainer.compute_loss
    from swift.trainers import Seq2SeqTrainer
    compute = Seq2SeqTrainer.compute_loss

    def compute_loss(self, model, *args, **kwargs):
        if self.model.training:
            with open(os.environ["VLMFLOW_TEST_PASSES"] + os.environ["RANK"], "a") as file:
                file.write(".")
        return compute(self, model, *args, **kwargs)

    Seq2SeqTrainer.compute_loss = compute_loss
"""
"""Count each rank's forward passes of training in the file PASSES + rank."""

BAD_ROW = """
if TRAINER:
    import os
    from itertools import pairwise
    from swift.trainers import Seq2SeqTrainer
    compute = Seq2SeqTrainer.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        rows = [end - begin for begin, end in pairwise(inputs["cu_seq_lens_q"])]
        loss = compute(self, model, inputs, *args, **kwargs)
        return loss * float("nan") if int(os.environ["VLMFLOW_TEST_BAD_ROW"]) in rows else loss

    Seq2SeqTrainer.compute_loss = compute_loss
"""
"""Make the loss of each pass with a row of BAD_ROW tokens no number."""

SMALL_GPU = """
if TRAINER:
    import os, torch
    from swift.trainers import Seq2SeqTrainer
    compute = Seq2SeqTrainer.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.model.training and inputs["input_ids"].numel() > int(os.environ["VLMFLOW_TEST_TOKENS_THAT_FIT"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return compute(self, model, inputs, *args, **kwargs)

    Seq2SeqTrainer.compute_loss = compute_loss
"""
"""Make each pass of more than TOKENS_THAT_FIT tokens run out of memory."""

ROWS, STEPS, MOST = 22, 3, 250
"""Rows of the train split; two steps of eight rows and a smaller one; tokens of a micro-batch."""

SETTINGS: dict[str, Any] = {
    "epochs": 1,
    "checkpoint_steps": 2,
    "evaluation_steps": 2,
    "learning_rate": 1e-4,
    "lora": {"dropout": 0},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.write(tmp_path_factory.mktemp("text"), vision=False, rows=ROWS, longest=60)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return a Qwen3-VL with rows of which every other one has a picture."""
    return Tiny.write(tmp_path_factory.mktemp("seeing"), vision=True, rows=ROWS, mixed=True, longest=60)


@pytest.fixture
def on_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    before_trainers(tmp_path, DEEPSPEED + FSDP2 + COUNT_PASSES, monkeypatch)
    return monkeypatch


def figures(trained: Trained) -> list[list[float]]:
    """Return what was logged: loss and gradient norm of each step, and validation losses."""
    logs = [event for event in read_events(trained.folder.progress) if isinstance(event, Log)]
    each = [[getattr(log, name) for name in ("loss", "grad_norm", "eval_loss")] for log in logs]
    return [[value for value in values if isinstance(value, float)] for values in each]


def weights_of(trained: Trained) -> torch.Tensor:
    """Return the numbers of the trained adapter."""
    tensors = load_file(trained.last.folder / "adapter_model.safetensors")
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def trained_both_ways(
    tiny: Tiny,
    folder: Path,
    patch: pytest.MonkeyPatch,
    tuner: str,
    strategy: str,
    processes: int,
    padded: bool = False,
) -> None:
    """Train with one row per pass and with micro-batches, and compare."""
    found: dict[str, Trained] = {}
    counted: dict[str, list[int]] = {}
    rows = {"gradient_accumulation_steps": 8 // processes}
    for way, tokens in (("rows", None), ("planned", MOST)):
        patch.setenv("VLMFLOW_TEST_PASSES", str(folder / f"{way}-"))
        settings = SETTINGS | rows | {"micro_batch_tokens": tokens}
        training = tiny.training(TUNERS[tuner], STRATEGIES[strategy], processes, **settings)
        training = replace(training, data=replace(training.data, one_sequence=not padded))
        found[way] = train(training, folder / way, 2, "train_model r")
        counted[way] = [(folder / f"{way}-{rank}").stat().st_size for rank in range(processes)]
    plain, planned = found["rows"], found["planned"]
    for ours, theirs in zip(figures(planned), figures(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    if TUNERS[tuner].trains_adapter:  # of a model's own weights, some have gradients of rounding errors alone
        assert (weights_of(plain) - weights_of(planned)).norm() < 1e-3 * weights_of(plain).norm()
    assert set(counted["rows"]) == {ROWS // processes}
    assert len(set(counted["planned"])) == 1
    assert counted["planned"][0] <= ROWS // processes / 2
    sizes = sizes_of(tiny)
    for step in range(1, STEPS + 1):
        of_ranks = [rows_of_step(found[way].folder.path, step) for way in ("rows", "planned")]
        rows_of_both = [
            sorted(row for batches in step.values() for batch in batches for row in batch) for step in of_ranks
        ]
        assert rows_of_both[0] == rows_of_both[1]
        for batch in (batch for batches in of_ranks[1].values() for batch in batches):
            of_rows = [sizes[row] for row in batch]
            assert len(batch) == 1 or (len(batch) * max(of_rows) if padded else sum(of_rows)) <= MOST


@pytest.mark.parametrize(
    ("base", "tuner", "strategy", "processes"),
    [
        ("seeing", "lora", "ddp", 2),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                ("seeing", "full", "fsdp2", 2),
                *((base, tuner, "ddp", 1) for base in ("text", "seeing") for tuner in ("lora", "qlora", "full")),
                *(("seeing", "lora", strategy, 2) for strategy in ("zero2", "zero2_offload", "zero3", "fsdp2")),
                ("text", "lora", "zero3", 2),
                *(("text", "full", strategy, 2) for strategy in ("ddp", "zero2", "zero3")),
            )
        ),
    ],
)
def test_micro_batches_train_what_single_rows_do(
    base: str,
    tuner: str,
    strategy: str,
    processes: int,
    tmp_path: Path,
    on_cores: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    trained_both_ways(request.getfixturevalue(base), tmp_path, on_cores, tuner, strategy, processes)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["text", "seeing"])
def test_padded_micro_batches_train_the_same(
    base: str, tmp_path: Path, on_cores: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    trained_both_ways(request.getfixturevalue(base), tmp_path, on_cores, "lora", "ddp", 1, padded=True)


@pytest.mark.slow
def test_a_killed_training_with_dropout_resumes_to_the_same_bytes(seeing: Tiny, tmp_path: Path) -> None:
    """Its plan is kept, and so are the random numbers of each micro-batch; the last step is of a second epoch.

    With workers a loader that was started goes on into the second epoch; the resumed training's has not been started.
    """
    settings = SETTINGS | {
        "dataloader_workers": 2,
        "checkpoint_steps": 1,
        "evaluation_steps": 2,
        "lora": {"dropout": 0.2},
        "max_steps": STEPS + 1,
    }
    training = seeing.training(**settings, gradient_accumulation_steps=8, micro_batch_tokens=MOST)
    unbroken = train(training, tmp_path / "unbroken", 2, "train_model r")
    train_and_kill(training, tmp_path / "killed", 2)
    resumed = train(training, tmp_path / "killed", 2, "train_model r")
    assert (resumed.folder.path / PLAN).read_bytes() == (unbroken.folder.path / PLAN).read_bytes()
    assert torch.equal(weights_of(resumed), weights_of(unbroken))
    of_plan = [sorted(rows) for epoch in (0, 1) for rows in plan_of(training).rows(epoch)]
    for step in range(1, STEPS + 2):
        (batches,) = rows_of_step(resumed.folder.path, step).values()
        assert sorted(row for batch in batches for row in batch) == of_plan[step - 1]


def sizes_of(tiny: Tiny) -> list[int]:
    """Return the tokens of each row of a text model."""
    return [json.loads(line)["text_tokens"] for line in (tiny.folder / "train.lengths.jsonl").open()]


def test_a_bad_step_names_the_row_of_its_micro_batch(
    text: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_of(text)
    (bad,) = (row for row, size in enumerate(sizes) if size == max(sizes))
    before_trainers(tmp_path, DEEPSPEED + BAD_ROW, monkeypatch)
    monkeypatch.setenv("VLMFLOW_TEST_BAD_ROW", str(sizes[bad]))
    training = text.training(processes=2, **SETTINGS, gradient_accumulation_steps=4, micro_batch_tokens=MOST)
    with pytest.raises(TrainingFailedError, match="the loss is not a finite number"):
        train(training, tmp_path / "runs", 2, "train_model r")
    account = json.loads((tmp_path / "runs" / training.digest() / BAD_STEP).read_text())
    assert account["rows"] == [bad]


def test_auto_is_what_a_smoke_run_survives(
    text: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what the estimate lets fit, the fastest is tried; what does not fit the GPU is halved."""
    monkeypatch.setattr("vlmflow.supervisor.smoke.NUMBERS", [64, 128, 256, 512])
    before_trainers(tmp_path, DEEPSPEED + SMALL_GPU, monkeypatch)
    monkeypatch.setenv("VLMFLOW_TEST_TOKENS_THAT_FIT", "260")
    full = text.training(**SETTINGS | {"gradient_checkpointing": "auto"}, gradient_accumulation_steps=8)
    lengths = [list(read_lengths(text.folder / f"{split}.lengths.jsonl")) for split in ("train", "val")]
    tried = []

    def smoke(full: Training) -> Trained:
        assert full.micro_batch_tokens is not None
        tried.append((full.micro_batch_tokens, full.gradient_checkpointing))
        chosen = choose_rows(*lengths, full, SmokeSettings(steps=4, longest=4, sample=8))
        assert [row.id for row in chosen.train[:8]]
        return train(
            smoke_training(full, chosen, SmokeSettings(steps=4), tmp_path), tmp_path, 2, "smoke", resumes=False
        )

    with caplog.at_level("INFO"):
        found, _ = find_passes(full, lambda number, again: number <= (512, 256)[again], smoke)
    assert tried == [(512, False), (256, False)]
    assert found.passes == Passes(256, gradient_checkpointing=False)
    assert found.digest() == full.digest(), "the digest has the word"
    assert "micro-batches of 512 tokens without gradient_checkpointing did not fit the GPU; trying less" in caplog.text
    assert "next best: micro-batches of 256 tokens with gradient_checkpointing, 1.33 times the time" in caplog.text


def test_a_smoke_run_trains_the_dearest_micro_batch_of_all_epochs(text: Tiny, tmp_path: Path) -> None:
    """The rows of one step may fill a micro-batch with more trained tokens than any step of the first epoch."""
    settings, needs = SETTINGS | {"epochs": 8}, ("tokens", "trained_tokens")
    full = text.training(**settings, gradient_accumulation_steps=4, micro_batch_tokens=MOST)
    train_rows, val = (list(read_lengths(text.folder / f"{split}.lengths.jsonl")) for split in ("train", "val"))
    chosen = choose_rows(train_rows, val, full, SmokeSettings(steps=6, longest=2, sample=8))
    small = smoke_training(full, chosen, SmokeSettings(steps=6), tmp_path)

    def dearest(training: Training, rows: list[RowLength], epochs: int) -> list[int]:
        plan = plan_of(training)
        steps = (step for epoch in range(epochs) for step in plan.steps(epoch))
        batches = [batch for step in steps for batches in step for batch in batches]
        return [max(sum(getattr(rows[row], what) for row in batch) for batch in batches) for what in needs]

    found, expected = dearest(small, chosen.train, 1), dearest(full, train_rows, 8)
    assert all(one >= other for one, other in zip(found, expected, strict=True))
    assert dearest(full, train_rows, 1) != dearest(full, train_rows, 8), "otherwise nothing is tested"


def test_auto_computes_activations_again_where_the_least_number_does_not_fit_without(text: Tiny) -> None:
    full = text.training(**SETTINGS | {"gradient_checkpointing": "auto"}, gradient_accumulation_steps=8)

    def smoke(full: Training) -> str:
        if not full.gradient_checkpointing:
            raise TooLargeError("CUDA out of memory", "")
        return "done"

    found, done = find_passes(full, lambda number, again: number <= 1024, smoke)
    assert (found.passes, done) == (Passes(1024, gradient_checkpointing=True), "done")


def test_rows_that_may_share_a_sequence_now_are_planned_anew_with_the_same_passes(text: Tiny, tmp_path: Path) -> None:
    full = text.training(**SETTINGS | {"gradient_checkpointing": "auto"}, gradient_accumulation_steps=8)
    padded = replace(
        full, data=replace(full.data, one_sequence=False), passes=Passes(256, gradient_checkpointing=False)
    )
    begun = kept_plan(padded, RunFolder(tmp_path), "train_model r")
    resumed = kept_plan(replace(full, passes=Passes(512, gradient_checkpointing=True)), RunFolder(tmp_path), "r")
    assert begun is not None
    assert resumed is not None
    assert (begun.padded, resumed.padded) == (True, False)
    assert begun.passes == resumed.passes
    assert read_plan(RunFolder(tmp_path)) == resumed


def test_a_number_that_a_run_sets_itself_is_not_taken_from_the_run_folder(text: Tiny, tmp_path: Path) -> None:
    full = text.training(**SETTINGS, gradient_accumulation_steps=8, micro_batch_tokens=MOST)
    plan = kept_plan(full, RunFolder(tmp_path), "train_model r")
    assert plan is not None
    write_account(tmp_path / PLAN, msgspec.structs.replace(plan, passes=Passes(9000, gradient_checkpointing=True)))
    assert kept_plan(full, RunFolder(tmp_path), "train_model r") == plan == read_plan(RunFolder(tmp_path))


@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig])
def test_rows_of_a_model_with_windows_do_not_share_a_sequence(kind: type[PreTrainedConfig]) -> None:
    """Qwen3-MoE has one window for all layers, and does not list them."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    for settings, joins in (({}, True), (windows, False)):
        meta = SimpleNamespace(is_multimodal=False)
        template = SimpleNamespace(support_padding_free=None, model_meta=meta, config=kind(**settings))
        assert joins_rows(template) == joins


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
def test_no_logit_moves_with_a_neighbouring_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit; the way without our attention lets each row see those before it."""
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    monkeypatch.setattr(ALL_MASK_ATTENTION_FUNCTIONS, "_local_mapping", {})
    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "_global_mapping", dict(ALL_ATTENTION_FUNCTIONS))
    monkeypatch.setattr(type(ALL_MASK_ATTENTION_FUNCTIONS), "_global_mapping", dict(ALL_MASK_ATTENTION_FUNCTIONS))
    torch.manual_seed(1)
    model = model_of(kind)
    begins = [0, 7, 12, 30]
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(begins)])[None]
    tokens = torch.randint(5, 90, (1, begins[-1]))
    changed = tokens.clone()
    changed[:, 7:12] = torch.randint(5, 90, (1, 5))

    def logits(words: torch.Tensor) -> torch.Tensor:
        position_ids = positions if kind == "qwen3" else positions.expand(3, 1, -1)
        with torch.no_grad():
            return model(input_ids=words, position_ids=position_ids, cu_seq_lens_q=begins, use_cache=False).logits

    keep_rows_apart()
    before, after = logits(tokens), logits(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert torch.equal(before[:, 12:], after[:, 12:])
    assert not torch.equal(before[:, 7:12], after[:, 7:12])
    for begin, end in pairwise(begins):
        with torch.no_grad():
            alone = model(input_ids=tokens[:, begin:end], use_cache=False).logits
        torch.testing.assert_close(before[:, begin:end], alone, rtol=1e-5, atol=1e-6)


def model_of(kind: str) -> torch.nn.Module:
    """Return a tiny model with random weights."""
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**text, attn_implementation="sdpa")).eval()
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope}, vision_config=vision, attn_implementation="sdpa"
    )
    return Qwen3VLForConditionalGeneration(config).eval()
