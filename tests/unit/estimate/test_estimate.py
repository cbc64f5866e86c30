"""What the estimate of a run says, and how it changes with the run's settings."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from made_inputs import ROWS, TEXT, changed, settings_of, shape_8b, some_inputs, text_shape
from vlmflow.config.gpus import GPUS
from vlmflow.config.strategies import DDP, STRATEGIES
from vlmflow.estimate.changes import DATA, FITS, changes, longest_that_fits, parts_of, share
from vlmflow.estimate.estimate import disk, estimate
from vlmflow.estimate.memory import base_bytes, memory, states, trained_of
from vlmflow.estimate.run import EstimateInput, RowLengths
from vlmflow.estimate.shape import PARTS, Files, ModelShape
from vlmflow.estimate.times import Work, amount, comparison_seconds, forward, times, training
from vlmflow.lengths.steps import Steps

SMALL_CARD, LARGE_CARD = GPUS["rtx-4090"], GPUS["h200"]


KEEPS_ALL = {"gradient_checkpointing": False}
"""Then the activations of all layers count, not only the logits."""


def needed(inputs: EstimateInput) -> int:
    return memory(inputs).total


def test_the_parts_of_the_memory_are_its_total() -> None:
    for train in ({}, {"gradient_checkpointing": False}, {"per_device_batch_size": 4}):
        found = memory(some_inputs(train))
        assert sum(size for _, size in parts_of(found)) == found.total


def test_gradient_checkpointing_needs_less_memory() -> None:
    assert needed(some_inputs()) < needed(some_inputs(KEEPS_ALL))


@pytest.mark.parametrize(
    ("train", "others"),
    [
        ({"per_device_batch_size": 2}, {}),
        ({"attention": "eager"}, {}),
        pytest.param({"dtype": "float32"}, {}, marks=pytest.mark.slow),
        pytest.param({"lora": {"rank": 64}}, {}, marks=pytest.mark.slow),
        pytest.param({"lora": {"dropout": 0.5}}, {}, marks=pytest.mark.slow),
        ({"freeze": []}, {}),
        ({}, {"tuner": "full"}),
    ],
)
def test_what_needs_more_memory(train: dict[str, Any], others: dict[str, Any]) -> None:
    usual = some_inputs(KEEPS_ALL | {"lora": {"dropout": 0}})
    assert needed(some_inputs(KEEPS_ALL | {"lora": {"dropout": 0}} | train, **others)) > needed(usual)


@pytest.mark.parametrize(
    ("train", "others"),
    [
        ({}, {"tuner": "qlora"}),
        ({"liger": True}, {}),
        ({"max_length": 512}, {}),
        ({"freeze": ["vision_tower"]}, {"strategy": "zero3", "processes": 4}),
        ({"sequence_parallel": 2, "attention": "flash_attention_2"}, {"processes": 2}),
    ],
)
def test_what_needs_less_memory(train: dict[str, Any], others: dict[str, Any]) -> None:
    assert needed(some_inputs(train, **others)) < needed(some_inputs())


def test_padded_rows_cost_more_than_the_same_tokens_in_one_sequence() -> None:
    padded = KEEPS_ALL | {"per_device_batch_size": 4}
    rows = [(2_000, 0)] * 40
    assert needed(some_inputs(padded, rows)) > needed(replace(some_inputs(KEEPS_ALL, rows), micro_batch_tokens=8_000))


def test_only_trained_tokens_have_logits() -> None:
    """Of a row alone; of several padded ones ms-swift keeps the columns of untrained tokens too."""
    lengths = RowLengths.of([(4_000, 500, 1_000), (3_000, 900)])
    inputs = replace(some_inputs(), train=lengths)
    assert [batch.logits for batch in inputs.batches()] == [1_000, 3_000]
    assert [batch.tokens for batch in inputs.batches()] == [4_500, 3_900]
    padded = inputs.with_settings(per_device_batch_size=2)
    assert [batch.logits for batch in padded.batches()] == [8_000, 6_000]


def test_a_file_without_trained_tokens_means_that_all_text_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(
        '{"id": "a", "start": 0, "end": 9, "text_tokens": 30, "picture_tokens": 5}\n'
        '{"id": "b", "start": 9, "end": 9, "text_tokens": 9, "trained_tokens": 7, "picture_tokens": 8, "pictures": 2}\n'
    )
    found = RowLengths.read(file)
    assert (found.trained.tolist(), found.shown.tolist()) == ([30, 7], [1, 2])
    assert found.fitted(20, shorten=True).trained.tolist() == [15, 7]


def test_the_dearest_micro_batch_has_the_densest_tokens_or_a_long_row_alone() -> None:
    """Trained tokens: at most 60 % of a row; of pictures: at most 80 %."""
    lengths = RowLengths.of([(500, 500, 200), (1_000, 0, 600), (100, 400, 100), (9_000, 0, 90)])
    inputs = replace(some_inputs({"max_length": 16_384}), train=lengths, micro_batch_tokens=4_000)
    alone, trained, pictures = inputs.batches()
    assert (alone.rows, alone.tokens, alone.logits, alone.pictures) == (1, 9_000, 90, 0)
    assert (trained.tokens, trained.logits, trained.pictures) == (4_000, 2_400, 1_600)
    assert (pictures.tokens, pictures.logits, pictures.pictures) == (4_000, 800, 3_200)
    assert trained.rows * trained.longest >= 4_000


def test_only_rows_that_fit_max_length_count() -> None:
    short = [(300, 0)] * 9
    assert needed(some_inputs({"max_length": 400}, rows=[*short, (5_000, 0)])) == needed(some_inputs(rows=short))
    shortened = some_inputs({"max_length": 400}, rows=[*short, (5_000, 0)], over_long="shorten")
    assert len(shortened.train) == 10
    assert shortened.train.tokens.max() == 400


def test_without_a_row_that_fits_there_is_still_an_estimate() -> None:
    found = estimate(some_inputs({"max_length": 10}), "h100", 2.0)
    assert (found.steps, found.rows, found.tokens, found.longest) == (0, 0, 0, 0)
    assert found.memory.weights > 0
    assert found.changes == []


def test_the_row_with_most_tokens_need_not_be_the_one_that_needs_most() -> None:
    """Logits of many text tokens take more than a picture with as many tokens."""
    text, picture = (3_000, 0), (100, 3_000)
    assert needed(some_inputs(rows=[text, picture])) == max(needed(some_inputs(rows=[row])) for row in (text, picture))


def test_steps_are_those_of_the_trainer() -> None:
    inputs = some_inputs({"epochs": 2, "gradient_accumulation_steps": 4}, processes=3, strategy="zero3")
    count = Steps.of(len(ROWS), inputs.settings, 3)
    work = amount(inputs)
    assert work.steps == count.total
    assert work.tokens == pytest.approx(2 * sum(map(sum, ROWS)) * count.rows / len(ROWS), abs=1)


def test_operations_grow_by_the_square_of_a_rows_tokens() -> None:
    work = training(shape_8b(), some_inputs().mode)
    one, two = (work.of(RowLengths.of([(tokens, 0)])) for tokens in (1_000, 2_000))
    assert two - 2 * one == work.token_square * 2 * 1_000**2


def test_the_sum_of_very_many_tokens_does_not_overflow() -> None:
    """Sums of whole numbers in NumPy wrap around at 2⁶³."""
    logits = replace(training(shape_8b(), some_inputs().mode), token=0, token_square=0)
    assert logits.of(RowLengths.of([(2**62, 0)] * 4)) == pytest.approx(logits.logit * 2**64)


def test_a_trained_weight_costs_six_operations_and_two_more_with_checkpointing() -> None:
    """The rule of thumb for full fine-tuning of a dense model: six per weight and token, eight with repetition."""
    text_only = text_shape()
    mode = some_inputs(tuner="full", shape=text_only).mode
    linear = 36 * (4_096 * 4_096 * 2 + 4_096 * 1_024 * 2 + 3 * 4_096 * 12_288)
    assert forward(text_only, mode).token == 2 * linear
    assert training(text_only, changed(mode, gradient_checkpointing=False)).token == 6 * linear
    assert training(text_only, mode).token == 8 * linear
    assert training(text_only, mode).logit == 6 * TEXT["vocab_size"] * TEXT["hidden_size"]


def test_a_frozen_tower_costs_only_its_forward_pass() -> None:
    frozen, trained = (
        training(shape_8b(), some_inputs({"freeze": freeze, "gradient_checkpointing": False}).mode)
        for freeze in (["vision_tower", "aligner"], [])
    )
    assert frozen.picture_square == 4**2 * 4 * 27 * 1_152
    assert trained.picture - frozen.picture > 4 * 2 * 27 * (4 * 1_152**2 + 2 * 1_152 * 4_304)
    assert trained.picture_square == pytest.approx(3 * frozen.picture_square, rel=0.04), "none for the first layer's"


def test_a_lower_share_of_the_peak_takes_longer() -> None:
    for gpu in GPUS.values():
        fast, slow = (times(some_inputs(), gpu, fast=fast) for fast in (True, False))
        low, high = gpu.shares
        assert (slow.share_of_peak, fast.share_of_peak) == (low, high)
        assert fast.seconds < slow.seconds <= max(high / low, 33 / 23) * fast.seconds
        assert slow.token_seconds == pytest.approx(high / low * fast.token_seconds)


@pytest.mark.parametrize("text", [60, 6_000])
def test_a_batch_takes_what_its_kernels_or_its_tokens_take(text: int) -> None:
    """The GPU computes while further kernels are started."""
    inputs = some_inputs({"evaluation_steps": 10**6, "gradient_accumulation_steps": 4}, rows=[(text, 0)] * 400)
    found = times(inputs, GPUS["h100"], fast=False)
    kernels, tokens = found.batch_seconds, text * found.token_seconds
    assert (kernels > tokens) == (text == 60)
    expected = amount(inputs).steps * (4 * max(kernels, tokens) + found.step_seconds)
    assert (1 - found.evaluation_share) * found.seconds == pytest.approx(expected)


def test_an_8b_takes_10_to_14_ms_a_layer_at_least() -> None:
    fast, slow = (times(some_inputs(), GPUS["h100"], fast=fast).batch_seconds / 36 for fast in (True, False))
    assert (fast, slow) == (pytest.approx(10e-3, rel=0.05), pytest.approx(14e-3, rel=0.02))


def test_padding_takes_time() -> None:
    padded = some_inputs(
        {"per_device_batch_size": 2, "gradient_accumulation_steps": 1}, rows=[(200, 0), (6_000, 0)] * 50
    )
    batches = amount(padded).batches
    alone = training(shape_8b(), padded.mode)
    assert batches.flops.sum() > alone.of(padded.train)
    assert len(batches.flops) == 50


def test_planned_micro_batches_take_less_time_than_rows_one_by_one() -> None:
    """Their kernels are started for many rows at once."""
    gpu = GPUS["h100"]
    one_by_one = some_inputs(rows=[(300, 0)] * 400)
    planned = replace(one_by_one, micro_batch_tokens=1_200)
    assert amount(planned).batches.counts.tolist() == [2] * 50
    found = times(planned, gpu, fast=False)
    step = found.step_seconds + 2 * max(found.batch_seconds, 1_200 * found.token_seconds)
    assert found.seconds * (1 - found.evaluation_share) == pytest.approx(50 * step)
    assert found.seconds < times(one_by_one, gpu, fast=False).seconds / 2


def test_sharded_weights_come_over_the_link() -> None:
    alone, shared = (some_inputs(processes=2, strategy=name) for name in ("ddp", "zero3"))
    fast_link, slow_link = GPUS["h100"], GPUS["h100-pcie"]
    alone_seconds, shared_seconds = (
        times(inputs, fast_link, fast=False).exchange_seconds for inputs in (alone, shared)
    )
    extra = shared_seconds - alone_seconds
    assert extra == pytest.approx(2 * 0.5 * 2 * 8.767e9 / fast_link.link, rel=0.01)
    assert times(shared, slow_link, fast=False).exchange_seconds > shared_seconds


def test_between_nodes_the_network_decides() -> None:
    """Weights and gradients cross it as often as the link of one node; 100 Gbit are 12.5 GB."""
    gpu = GPUS["h100"]
    (one, fast), (two, slow) = (
        (inputs, times(inputs, gpu, fast=False))
        for inputs in (some_inputs(processes=16 // nodes, nodes=nodes, strategy="zero3") for nodes in (1, 2))
    )
    assert (one.mode.processes, two.mode.processes) == (16, 16)
    longer = 1 / 12.5e9 - 1 / gpu.link
    gathered = 2 * 15 / 16 * base_bytes(shape_8b(), two.mode)
    assert slow.exchange_seconds - fast.exchange_seconds == pytest.approx(gathered * longer)
    exchanged = 9 * 15 / 16 * 2 * trained_of(shape_8b(), two.mode)
    assert slow.step_seconds - fast.step_seconds == pytest.approx(exchanged * longer)


def test_a_network_that_is_faster_than_the_link_does_not_help() -> None:
    run: dict[str, Any] = {"strategy": "zero3", "network_gbit": 800}
    one, two = (
        times(some_inputs(nodes=nodes, processes=4 // nodes, **run), GPUS["rtx-4090"], fast=False) for nodes in (1, 2)
    )
    assert one == two


def with_hpz(size: int, **zero: Any) -> dict[str, Any]:
    """Give the settings of 16 GPUs on two nodes, with a second copy of the weights that `size` of them share."""
    stage = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "zero_hpz_partition_size": size, **zero}
    deepspeed = {"zero_optimization": stage}
    return {"strategy": "deepspeed", "nodes": 2, "processes": 8, "tuner": "full", "deepspeed": deepspeed}


def test_a_second_copy_of_the_weights_takes_memory() -> None:
    """DeepSpeed's hpZ: each GPU has one more share, of those of its group."""
    alone, shared = (states(shape_8b(), some_inputs(**with_hpz(size)).mode) for size in (1, 8))
    assert shared.weights - alone.weights == base_bytes(shape_8b(), some_inputs(**with_hpz(8)).mode) / 8
    assert structs.replace(shared, weights=alone.weights) == alone
    needed_more = needed(some_inputs(**with_hpz(8))) - needed(some_inputs(**with_hpz(1)))
    assert needed_more == shared.weights - alone.weights
    lora = states(shape_8b(), some_inputs(**with_hpz(8) | {"tuner": "lora"}).mode)
    bare = states(shape_8b(), some_inputs(**with_hpz(1) | {"tuner": "lora"}).mode)
    assert lora.weights - bare.weights > shared.weights - alone.weights
    on_host = with_hpz(8, offload_param={"device": "cpu"})
    assert states(shape_8b(), some_inputs(**on_host).mode).weights == 0
    assert states(shape_8b(), some_inputs(**on_host).mode).host == shared.weights


def test_a_second_copy_needs_stage_3_and_a_number() -> None:
    for size, zero in ((8, {"stage": 2}), ("auto", {}), (1, {}), (None, {})):
        assert some_inputs(**with_hpz(size, **zero)).mode.strategy.second_copy == 0


def test_weights_with_a_second_copy_do_not_cross_the_network_in_each_batch() -> None:
    """They come over the link from the other GPUs of the node; gradients still cross the network."""
    gpu = GPUS["h100"]
    alone, shared = (times(some_inputs(**with_hpz(size)), gpu, fast=False) for size in (1, 8))
    every = base_bytes(shape_8b(), some_inputs(**with_hpz(8)).mode)
    less = 2 * every * (15 / 16 / 12.5e9 - 7 / 8 / gpu.link)
    assert alone.exchange_seconds - shared.exchange_seconds == pytest.approx(less)
    assert alone.step_seconds == shared.step_seconds


def test_evaluations_have_their_share() -> None:
    often, seldom = (some_inputs({"evaluation_steps": steps, "checkpoint_steps": 1}) for steps in (1, 1_000))
    shares = [times(inputs, LARGE_CARD, fast=False).evaluation_share for inputs in (often, seldom)]
    assert shares[0] > shares[1] > 0
    assert amount(often).evaluation_flops == 50 * amount(seldom).evaluation_flops


def test_a_comparison_with_the_base_costs_28_passes_of_a_row() -> None:
    def seconds(**others: Any) -> float:
        return comparison_seconds(some_inputs(**others), LARGE_CARD, fast=False)

    assert seconds() == 0
    assert seconds(compared_rows=2000) == pytest.approx(2 * seconds(compared_rows=1000))
    assert seconds(compared_rows=1000, processes=4) == pytest.approx(seconds(compared_rows=1000) / 4)
    assert seconds(compared_rows=1000, processes=4, nodes=2) == pytest.approx(seconds(compared_rows=1000) / 4)
    alike = some_inputs(rows=[(3_000, 256)] * 40, compared_rows=100)
    one = forward(alike.shape, alike.mode).of(RowLengths.of([(3_000, 256)]))
    computing = 2800 * one / (LARGE_CARD.flops * LARGE_CARD.shares[0])
    assert comparison_seconds(alike, LARGE_CARD, fast=False) == pytest.approx(computing)
    on = estimate(alike, "h200", None).on("h200")
    assert on is not None
    assert (on.fast_comparison, on.slow_comparison) == tuple(
        comparison_seconds(alike, LARGE_CARD, fast=fast) for fast in (True, False)
    )


def test_price_is_that_of_all_gpus() -> None:
    found = estimate(some_inputs(processes=4, strategy="zero3"), "h100", 2.5)
    on = found.on("h100")
    assert on is not None
    assert on.slow_price == pytest.approx(4 * 2.5 * on.slow.hours)
    assert on.fast_price == pytest.approx(4 * 2.5 * on.fast.hours)
    assert found.on("a100-80gb").slow_price is None
    spread = estimate(some_inputs(processes=2, nodes=2, strategy="zero3"), "h100", 2.5).on("h100")
    assert spread.slow_price == pytest.approx(4 * 2.5 * spread.slow.hours)
    assert estimate(some_inputs(), None, None).on(None) is None


def test_disk_is_that_of_models_and_checkpoints() -> None:
    inputs = some_inputs({"keep_checkpoints": 3})
    found = disk(inputs)
    assert found.model == found.merged == 2 * 8_767_123_696
    assert found.checkpoint == 12 * trained_of(shape_8b(), inputs.mode)
    assert found.checkpoints == 4 * found.checkpoint


def test_a_checkpoint_of_full_fine_tuning_has_all_weights() -> None:
    """Under ZeRO 2 twice, beside the optimizer's moments and 32-bit weights."""
    weights = 8_767_123_696
    for strategy, copies in (("zero2", 2), ("zero3", 1)):
        inputs = some_inputs({"freeze": ["vision_tower"]}, tuner="full", strategy=strategy, processes=8)
        trained = trained_of(shape_8b(), inputs.mode)
        assert trained < weights
        assert disk(inputs).checkpoint == pytest.approx(copies * 2 * weights + 12 * trained, rel=1e-6)


def test_four_bits_cost_time() -> None:
    lora, qlora = (
        times(some_inputs(tuner=name), SMALL_CARD, fast=False).exchange_seconds for name in ("lora", "qlora")
    )
    assert qlora > lora


def test_sharded_gradients_are_exchanged_in_each_batch() -> None:
    """By DeepSpeed's ZeRO 2; DDP exchanges them once in a step."""
    gpu = GPUS["rtx-4090"]
    for strategy, exchanges in (("ddp", 0), ("zero2", 4)):
        few, many = (
            some_inputs({"gradient_accumulation_steps": count}, processes=2, strategy=strategy) for count in (4, 8)
        )
        more = times(many, gpu, fast=False).step_seconds - times(few, gpu, fast=False).step_seconds
        once = trained_of(shape_8b(), few.mode) * few.mode.trained_bytes / 2 / gpu.link
        assert more == pytest.approx(exchanges * once)
        in_one = replace(many, micro_batch_tokens=10**6)
        fewer = times(many, gpu, fast=False).step_seconds - times(in_one, gpu, fast=False).step_seconds
        assert fewer == pytest.approx(exchanges / 4 * 7 * once), "one micro-batch in place of eight"


def test_planned_evaluations_take_fewer_batches() -> None:
    alone = some_inputs()
    planned = replace(alone, micro_batch_tokens=10**6)
    each, together = (
        work.evaluation_groups * work.evaluation_batches.of_a_group for work in map(amount, (alone, planned))
    )
    assert together == each / alone.settings.gradient_accumulation_steps


def test_fsdp2_gathers_a_layers_experts_and_not_those_of_all_layers() -> None:
    """Qwen3-30B-A3B's sizes: a layer has 1.3 GB."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    shape = text_shape("qwen3_moe", hidden_size=2_048, num_hidden_layers=48, **experts)
    found = states(shape, some_inputs(shape=shape, processes=8, strategy="fsdp2").mode)
    assert found.weights == pytest.approx(2 * 30.5e9 / 8, rel=0.02)
    assert 3e9 < found.gathered < 4.5e9


def test_offload_is_proposed_for_one_gpu_with_the_main_memory_that_it_needs() -> None:
    found = {one.what: one for one in changes(some_inputs(tuner="full"), GPUS["a100-80gb"])}
    offload = found["strategy: zero2_offload"]
    assert offload.fits
    assert re.search(r"in \d+ GB of main memory", offload.costs)


def test_more_gpus_train_the_same_rows_in_a_step() -> None:
    (more,) = (one for one in changes(some_inputs(tuner="full"), SMALL_CARD) if one.what.startswith("processes: "))
    assert more.what == "processes: 8, strategy: zero3, train.gradient_accumulation_steps: 1"


def test_more_gpus_of_each_node_are_proposed_by_the_key_that_they_change() -> None:
    """`processes` are those of a node."""
    found = changes(some_inputs(tuner="full", nodes=2, processes=1), GPUS["a40"])
    (more,) = (one for one in found if one.what.startswith("processes: "))
    assert more.what == "processes: 4, strategy: zero3, train.gradient_accumulation_steps: 2"
    of_all = some_inputs({"gradient_accumulation_steps": 2}, tuner="full", nodes=2, processes=4, strategy="zero3")
    assert more.memory == needed(of_all)
    assert more.gpu_hours == pytest.approx(8 * times(of_all, GPUS["a40"], fast=False).hours)


LARGE = {"hidden_size": 8_192, "num_hidden_layers": 64}
"""27 billion weights: full fine-tuning with zero3 takes 67 GB of each of 8 GPUs, 40 GB of 16 and 27 GB of 32."""


@pytest.mark.parametrize(
    ("nodes", "processes", "gpu", "expected"),
    [
        (1, 8, "a40", "nodes: 2, processes: 8, strategy: zero3, train.gradient_accumulation_steps: 4"),
        (1, 1, "a100-40gb", "nodes: 4, processes: 8, strategy: zero3"),
        (2, 8, "a100-40gb", "nodes: 4, processes: 8, strategy: zero3, train.gradient_accumulation_steps: 4"),
        (1, 16, "a100-40gb", "nodes: 2, processes: 16, strategy: zero3, train.gradient_accumulation_steps: 4"),
        (1, 1, "a100-80gb", None),
        (1, 8, "rtx-3090", None),
    ],
)
def test_more_machines_are_proposed_where_one_is_not_enough(
    nodes: int, processes: int, gpu: str, expected: str | None
) -> None:
    run: dict[str, Any] = {"tuner": "full", "shape": text_shape(**LARGE), "nodes": nodes, "processes": processes}
    more = [one.what for one in changes(some_inputs(**run), GPUS[gpu]) if one.what.startswith("nodes: ")]
    assert more == ([expected] if expected else [])


def test_machines_are_not_proposed_whose_gpus_cannot_share_rows_evenly() -> None:
    """A run refuses 8 processes with sequence_parallel: 3."""
    rows_of_three = {"sequence_parallel": 3, "attention": "flash_attention_2"}
    found = changes(some_inputs(rows_of_three, tuner="full", shape=text_shape(**LARGE), processes=3), GPUS["a40"])
    assert not any(one.what.startswith("nodes: ") for one in found)


def test_more_machines_come_before_another_product_with_the_hours_over_their_network() -> None:
    run: dict[str, Any] = {"tuner": "full", "shape": text_shape(**LARGE), "processes": 8, "strategy": "zero3"}
    gpu = GPUS["a40"]
    more, product = (one for one in changes(some_inputs(**run), gpu) if one.what.startswith(("nodes: ", "gpu: ")))
    spread = some_inputs({"gradient_accumulation_steps": 4}, **run, nodes=2)
    assert more.what.startswith("nodes: 2, processes: 8")
    assert more.memory == needed(spread)
    assert more.gpu_hours == pytest.approx(16 * times(spread, gpu, fast=False).hours)
    assert product.what == "gpu: a100-80gb"


def test_changes_are_computed_with_the_same_estimate() -> None:
    """Each figure of a change is that of the run with the changed settings."""
    now = {"per_device_batch_size": 2, "gradient_checkpointing": False}
    found = {one.what: one for one in changes(some_inputs(now), SMALL_CARD)}
    one_row = "train.per_device_batch_size: 1, train.gradient_accumulation_steps: 16"
    assert found[one_row].memory == needed(some_inputs(now | {"per_device_batch_size": 1}))
    assert found["train.gradient_checkpointing: true"].memory == needed(some_inputs({"per_device_batch_size": 2}))
    assert found["tuner: qlora"].memory == needed(some_inputs(now, tuner="qlora"))
    (product,) = (one for one in found.values() if one.what.startswith("gpu: "))
    assert product.memory == needed(some_inputs(now)) <= 0.9 * GPUS[product.gpu].memory
    assert all(one.memory < needed(some_inputs(now)) or one.gpu != SMALL_CARD.name for one in found.values())


def test_a_change_that_needs_more_memory_is_not_proposed() -> None:
    """ZeRO-2 does not share the weights, wherever the optimizer is."""
    inputs = some_inputs(strategy="zero3", processes=4)
    assert needed(inputs.with_mode(strategy=STRATEGIES["zero2_offload"])) > needed(inputs)
    assert "strategy: zero2_offload" not in {one.what for one in changes(inputs, SMALL_CARD)}


def test_the_cheapest_change_comes_first() -> None:
    inputs = some_inputs({"per_device_batch_size": 2}, tuner="full", processes=2)
    order = [one.what.partition(":")[0] for one in changes(inputs, GPUS["a100-80gb"])]
    expected = ["train.per_device_batch_size", *["strategy"] * 5, "processes"]
    assert [name for name in order if name in expected] == expected


def test_strategies_without_tests_are_not_proposed() -> None:
    found = changes(some_inputs(tuner="qlora", processes=2), GPUS["rtx-3090"])
    assert not any("strategy" in one.what for one in found)


def test_a_lower_max_length_is_the_highest_that_fits_and_counts_the_rows_it_leaves_out() -> None:
    rows = [(300, 256)] * 50 + [(2_000 + 64 * number, 512) for number in range(10)]
    inputs = some_inputs({"max_length": 4_096}, rows=rows)
    tokens = longest_that_fits(inputs, SMALL_CARD)
    assert tokens % 64 == 0
    assert share(inputs.with_settings(max_length=tokens), SMALL_CARD) <= FITS
    assert share(inputs.with_settings(max_length=tokens + 64), SMALL_CARD) > FITS
    (lower,) = (one for one in changes(inputs, SMALL_CARD) if one.what == f"train.max_length: {tokens}")
    assert lower.rows_left_out == sum(text + picture > tokens for text, picture in rows) > 0
    assert f"{lower.rows_left_out} of 60 rows" in lower.costs


def test_a_max_length_that_leaves_out_most_rows_is_not_proposed() -> None:
    found = changes(some_inputs({"per_device_batch_size": 4}), SMALL_CARD)
    assert not any("max_length" in one.what for one in found)


def test_products_with_less_memory_come_first() -> None:
    sizes = [gpu.memory for gpu in GPUS.values()]
    assert sizes == sorted(sizes)


def test_two_changes_are_tried_together_where_none_is_enough() -> None:
    rows = [(7_000, 1_000)] * 20
    found = changes(some_inputs({"per_device_batch_size": 2}, rows=rows), SMALL_CARD)
    fitting = [one.what for one in found if one.fits]
    assert fitting
    assert any(";" in what for what in fitting) or all(not one.fits for one in found if ";" in one.what)


def test_a_smaller_picture_budget_scales_only_larger_pictures() -> None:
    inputs = some_inputs(rows=[(100, 1_000), (100, 100)])
    smaller = inputs.with_settings(image_max_tokens=256)
    assert smaller.train.pictures.tolist() == [256, 100]
    assert smaller.train.text.tolist() == [100, 100]
    three_each = replace(inputs, train=RowLengths.of([(100, 2_000, 0, 3), (100, 200, 0, 3)]))
    several = three_each.with_settings(image_max_tokens=256)
    assert several.train.pictures.tolist() == [768, 200], "the budget is that of each picture"


TILED = {"image_processor": {"image_processor_type": "GotOcr2ImageProcessor", "max_patches": 12}}
FIXED = {"image_processor": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}}}


def with_processor(processor: dict[str, Any]) -> ModelShape:
    content = json.dumps(processor | {"image_seq_length": 256})
    return structs.replace(shape_8b(), files=Files(shape_8b().files.content | {"processor_config.json": content}))


def test_a_smaller_budget_leaves_a_tile_and_is_not_proposed_where_the_processor_knows_none() -> None:
    inputs = some_inputs(rows=[(100, 1_000)] * 20)
    tiled, fixed = (replace(inputs, shape=with_processor(each)) for each in (TILED, FIXED))
    pictures = [each.with_settings(image_max_tokens=64).train.pictures[0] for each in (inputs, tiled, fixed)]
    assert pictures == [64, 256, 1_000]
    smaller_pictures = DATA[0]
    assert smaller_pictures(inputs, SMALL_CARD)
    assert smaller_pictures(fixed, SMALL_CARD) is None


def test_the_tower_s_attention_is_within_a_picture() -> None:
    work = Work(token=0, token_square=0, logit=0, picture=0, picture_square=1)
    assert work.of(RowLengths.of([(9, 30, 0, 3)])) == work.of(RowLengths.of([(9, 10)] * 3))


def test_every_product_has_all_figures() -> None:
    for name, gpu in GPUS.items():
        assert name == gpu.name
        assert gpu.source
        assert 24e9 <= gpu.memory <= 200e9
        assert 50e12 < gpu.flops < 5e15
        assert 1e11 < gpu.bandwidth < 1e13
        assert gpu.link < gpu.bandwidth


def test_the_estimate_knows_every_part_that_can_be_frozen() -> None:
    """`train.freeze` and the estimate have the same names."""
    assert settings_of({"freeze": list(PARTS[1:])}).train.freeze == list(PARTS[1:])
    assert some_inputs({"freeze": [PARTS[0]]}).mode.trained == frozenset(PARTS[1:])
    assert some_inputs().mode.strategy is DDP
    assert np.array_equal(RowLengths.of(ROWS).tokens, np.array([sum(row) for row in ROWS]))
