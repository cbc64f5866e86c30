"""What the estimate of a run says, and how it changes with the run's settings."""

import re
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from made_case import ROWS, SHAPE, TEXT, settings_of, some_case
from vlmflow.config.gpus import GPUS
from vlmflow.estimate.case import Case
from vlmflow.estimate.changes import FITS, changes, longest_that_fits, share
from vlmflow.estimate.disk import disk
from vlmflow.estimate.estimate import estimate
from vlmflow.estimate.memory import memory
from vlmflow.estimate.parameters import PARTS
from vlmflow.estimate.row_lengths import RowLengths
from vlmflow.estimate.shape import ModelShape
from vlmflow.estimate.states import base_bytes, states, trained_of
from vlmflow.estimate.times import HIGH, LOW, amount, comparison_seconds, times
from vlmflow.estimate.verdict import parts_of
from vlmflow.estimate.way import Sharding
from vlmflow.estimate.work import Work, forward, model_flops, training
from vlmflow.training.steps import Steps

SMALL_CARD, LARGE_CARD = GPUS["rtx-4090"], GPUS["h200"]


KEEPS_ALL = {"gradient_checkpointing": False}
"""Then the activations of all layers count, not only the logits."""


def needed(case: Case) -> int:
    return memory(case).total


def test_the_parts_of_the_memory_are_its_total() -> None:
    for train in ({}, {"gradient_checkpointing": False}, {"per_device_batch_size": 4}, {"dtype": "float32"}):
        found = memory(some_case(train))
        assert sum(size for _, size in parts_of(found)) == found.total


def test_gradient_checkpointing_needs_less_memory() -> None:
    assert needed(some_case()) < needed(some_case(KEEPS_ALL))


@pytest.mark.parametrize(
    ("train", "others"),
    [
        ({"per_device_batch_size": 2}, {}),
        ({"attention": "eager"}, {}),
        ({"dtype": "float32"}, {}),
        ({"lora": {"rank": 64}}, {}),
        ({"lora": {"dropout": 0.5}}, {}),
        ({"freeze": []}, {}),
        ({}, {"tuner": "full"}),
    ],
)
def test_what_needs_more_memory(train: dict[str, Any], others: dict[str, Any]) -> None:
    usual = some_case(KEEPS_ALL | {"lora": {"dropout": 0}})
    assert needed(some_case(KEEPS_ALL | {"lora": {"dropout": 0}} | train, **others)) > needed(usual)


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
    assert needed(some_case(train, **others)) < needed(some_case())


def test_only_rows_that_fit_max_length_count() -> None:
    short = [(300, 0)] * 9
    assert needed(some_case({"max_length": 400}, rows=[*short, (5_000, 0)])) == needed(some_case(rows=short))
    shortened = some_case({"max_length": 400}, rows=[*short, (5_000, 0)], over_long="shorten")
    assert len(shortened.train) == 10
    assert shortened.train.tokens.max() == 400


def test_without_a_row_that_fits_there_is_still_an_estimate() -> None:
    found = estimate(some_case({"max_length": 10}), "h100", 2.0)
    assert (found.steps, found.rows, found.tokens, found.longest) == (0, 0, 0, 0)
    assert found.memory.weights > 0
    assert found.changes == []


def test_the_row_with_most_tokens_need_not_be_the_one_that_needs_most() -> None:
    """Logits of many text tokens take more than a picture with as many tokens."""
    text, picture = (3_000, 0), (100, 3_000)
    assert needed(some_case(rows=[text, picture])) == max(needed(some_case(rows=[row])) for row in (text, picture))


def test_steps_are_those_of_the_trainer() -> None:
    case = some_case({"epochs": 2, "gradient_accumulation_steps": 4}, processes=3, strategy="zero3")
    count = Steps.of(len(ROWS), case.settings, 3)
    work = amount(case)
    assert work.steps == count.total
    assert work.tokens == pytest.approx(2 * sum(map(sum, ROWS)) * count.rows / len(ROWS), abs=1)


def test_operations_grow_by_the_square_of_a_rows_tokens() -> None:
    work = training(SHAPE, some_case().way)
    one, two = (work.of(RowLengths.of([(tokens, 0)])) for tokens in (1_000, 2_000))
    assert two - 2 * one == work.token_square * 2 * 1_000**2


def test_the_sum_of_very_many_tokens_does_not_overflow() -> None:
    """Sums of whole numbers in NumPy wrap around at 2⁶³."""
    logits = replace(training(SHAPE, some_case().way), token=0, token_square=0)
    assert logits.of(RowLengths.of([(2**62, 0)] * 4)) == pytest.approx(logits.logit * 2**64)


def test_a_trained_weight_costs_six_operations_and_two_more_with_checkpointing() -> None:
    """The rule of thumb for full fine-tuning of a dense model: six per weight and token, eight with repetition."""
    text_only = ModelShape(TEXT, None, tied=False)
    way = some_case(tuner="full", shape=text_only).way
    linear = 36 * (4_096 * 4_096 * 2 + 4_096 * 1_024 * 2 + 3 * 4_096 * 12_288)
    assert forward(text_only, way).token == 2 * linear
    assert model_flops(text_only, way).token == 6 * linear
    assert training(text_only, way).token == 8 * linear
    assert training(text_only, way).logit == 6 * TEXT.vocab_size * TEXT.hidden_size


def test_a_frozen_tower_costs_only_its_forward_pass() -> None:
    frozen, trained = (model_flops(SHAPE, some_case({"freeze": freeze}).way) for freeze in (["vision_tower"], []))
    assert frozen.patch_square == 4 * 27 * 1_152
    assert trained.patch - frozen.patch > 2 * 27 * (4 * 1_152**2 + 2 * 1_152 * 4_304)
    assert trained.patch_square == 3 * frozen.patch_square


def test_half_the_share_of_the_peak_takes_at_most_twice_as_long() -> None:
    for gpu in GPUS.values():
        fast, slow = (times(some_case(), gpu, part) for part in (HIGH, LOW))
        assert fast.seconds < slow.seconds <= 2 * fast.seconds
        assert slow.token_seconds == pytest.approx(2 * fast.token_seconds)
        assert slow.batch_seconds == fast.batch_seconds


def test_time_is_a_plus_b_times_tokens() -> None:
    case = some_case({"evaluation_steps": 10**6, "gradient_accumulation_steps": 1, "max_length": 4_096})
    found = times(case, LARGE_CARD, LOW)
    evaluation = found.evaluation_share * found.seconds
    steps, tokens = amount(case).steps, amount(case).tokens
    expected = steps * (found.batch_seconds + found.step_seconds) + tokens * found.token_seconds + evaluation
    assert found.seconds == pytest.approx(expected)


def test_sharded_weights_come_over_the_link() -> None:
    alone, shared = (some_case(processes=2, strategy=name) for name in ("ddp", "zero3"))
    fast_link, slow_link = GPUS["h100"], GPUS["h100-pcie"]
    extra = times(shared, fast_link, LOW).batch_seconds - times(alone, fast_link, LOW).batch_seconds
    assert extra == pytest.approx(2 * 0.5 * 2 * 8.767e9 / fast_link.link, rel=0.01)
    assert times(shared, slow_link, LOW).batch_seconds > times(shared, fast_link, LOW).batch_seconds


def test_between_nodes_the_network_decides() -> None:
    """Weights and gradients cross it as often as the link of one node; 100 Gbit are 12.5 GB."""
    gpu = GPUS["h100"]
    (one, fast), (two, slow) = (
        (case, times(case, gpu, LOW))
        for case in (some_case(processes=16 // nodes, nodes=nodes, strategy="zero3") for nodes in (1, 2))
    )
    assert (one.way.processes, two.way.processes) == (16, 16)
    longer = 1 / 12.5e9 - 1 / gpu.link
    gathered = 2 * 15 / 16 * base_bytes(SHAPE, two.way)
    assert slow.batch_seconds - fast.batch_seconds == pytest.approx(gathered * longer)
    exchanged = 9 * 15 / 16 * 2 * trained_of(SHAPE, two.way)
    assert slow.step_seconds - fast.step_seconds == pytest.approx(exchanged * longer)


def test_a_network_that_is_faster_than_the_link_does_not_help() -> None:
    slow_link = GPUS["rtx-4090"]
    seconds = [
        times(some_case(nodes=nodes, processes=4 // nodes, strategy="zero3", network_gbit=800), slow_link, LOW).seconds
        for nodes in (1, 2)
    ]
    assert seconds[0] == seconds[1]


def with_hpz(size: int, **zero: Any) -> dict[str, Any]:
    """Give the settings of 16 GPUs on two nodes, with a second copy of the weights that `size` of them share."""
    stage = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "zero_hpz_partition_size": size, **zero}
    deepspeed = {"zero_optimization": stage}
    return {"strategy": "deepspeed", "nodes": 2, "processes": 8, "tuner": "full", "deepspeed": deepspeed}


def test_a_second_copy_of_the_weights_takes_memory() -> None:
    """DeepSpeed's hpZ: each GPU has one more share, of those of its group."""
    alone, shared = (states(SHAPE, some_case(**with_hpz(size)).way) for size in (1, 8))
    assert shared.weights - alone.weights == base_bytes(SHAPE, some_case(**with_hpz(8)).way) / 8
    assert replace(shared, weights=alone.weights) == alone
    needed_more = needed(some_case(**with_hpz(8))) - needed(some_case(**with_hpz(1)))
    assert needed_more == shared.weights - alone.weights
    lora = states(SHAPE, some_case(**with_hpz(8) | {"tuner": "lora"}).way)
    bare = states(SHAPE, some_case(**with_hpz(1) | {"tuner": "lora"}).way)
    assert lora.weights - bare.weights > shared.weights - alone.weights
    on_host = with_hpz(8, offload_param={"device": "cpu"})
    assert states(SHAPE, some_case(**on_host).way).weights == 0
    assert states(SHAPE, some_case(**on_host).way).host == shared.weights


def test_a_second_copy_needs_stage_3_and_a_number() -> None:
    for size, zero in ((8, {"stage": 2}), ("auto", {}), (1, {}), (None, {})):
        assert some_case(**with_hpz(size, **zero)).way.sharding.second_copy == 0


def test_weights_with_a_second_copy_do_not_cross_the_network_in_each_batch() -> None:
    """They come over the link from the other GPUs of the node; gradients still cross the network."""
    gpu = GPUS["h100"]
    alone, shared = (times(some_case(**with_hpz(size)), gpu, LOW) for size in (1, 8))
    every = base_bytes(SHAPE, some_case(**with_hpz(8)).way)
    less = 2 * every * (15 / 16 / 12.5e9 - 7 / 8 / gpu.link)
    assert alone.batch_seconds - shared.batch_seconds == pytest.approx(less)
    assert alone.step_seconds == shared.step_seconds


def test_evaluations_have_their_share() -> None:
    often, seldom = (some_case({"evaluation_steps": steps, "checkpoint_steps": 1}) for steps in (1, 1_000))
    assert times(often, LARGE_CARD, LOW).evaluation_share > times(seldom, LARGE_CARD, LOW).evaluation_share > 0
    assert amount(often).evaluation_flops == 50 * amount(seldom).evaluation_flops


def test_a_comparison_with_the_base_costs_sixteen_passes_of_a_row() -> None:
    def seconds(**others: Any) -> float:
        return comparison_seconds(some_case(**others), LARGE_CARD, LOW)

    assert seconds() == 0
    assert seconds(compared_rows=2000) == pytest.approx(2 * seconds(compared_rows=1000))
    assert seconds(compared_rows=1000, processes=4) == pytest.approx(seconds(compared_rows=1000) / 4)
    assert seconds(compared_rows=1000, processes=4, nodes=2) == pytest.approx(seconds(compared_rows=1000) / 4)
    alike = some_case(rows=[(900, 256)] * 40, compared_rows=100)
    one = forward(alike.shape, alike.way).of_row(1156, 900, 256 * alike.shape.vision.patches_per_token)  # type: ignore[union-attr]
    computing = 1600 * one / (LARGE_CARD.flops * LOW)
    assert computing < comparison_seconds(alike, LARGE_CARD, LOW) < 1.5 * computing
    on = estimate(alike, "h200", None).on("h200")
    assert on is not None
    assert (on.fast_comparison, on.slow_comparison) == tuple(
        comparison_seconds(alike, LARGE_CARD, share) for share in (HIGH, LOW)
    )


def test_price_is_that_of_all_gpus() -> None:
    found = estimate(some_case(processes=4, strategy="zero3"), "h100", 2.5)
    on = found.on("h100")
    assert on is not None
    assert on.slow_price == pytest.approx(4 * 2.5 * on.slow.hours)
    assert on.fast_price == pytest.approx(4 * 2.5 * on.fast.hours)
    assert found.on("a100-80gb").slow_price is None
    spread = estimate(some_case(processes=2, nodes=2, strategy="zero3"), "h100", 2.5).on("h100")
    assert spread.slow_price == pytest.approx(4 * 2.5 * spread.slow.hours)
    assert estimate(some_case(), None, None).on(None) is None


def test_disk_is_that_of_models_and_checkpoints() -> None:
    case = some_case({"keep_checkpoints": 3})
    found = disk(case)
    assert found.model == found.merged == 2 * 8_767_123_696
    assert found.checkpoint == 12 * trained_of(SHAPE, case.way)
    assert found.checkpoints == 4 * found.checkpoint


def test_a_checkpoint_of_full_fine_tuning_has_all_weights() -> None:
    """Under ZeRO 2 twice, beside the optimizer's moments and 32-bit weights."""
    weights = 8_767_123_696
    for strategy, copies in (("zero2", 2), ("zero3", 1)):
        case = some_case({"freeze": ["vision_tower"]}, tuner="full", strategy=strategy, processes=8)
        trained = trained_of(SHAPE, case.way)
        assert trained < weights
        assert disk(case).checkpoint == pytest.approx(copies * 2 * weights + 12 * trained, rel=1e-6)


def test_four_bits_cost_time() -> None:
    lora, qlora = (times(some_case(tuner=name), SMALL_CARD, LOW).batch_seconds for name in ("lora", "qlora"))
    assert qlora > lora


def test_sharded_gradients_are_exchanged_in_each_batch() -> None:
    """By DeepSpeed's ZeRO 2; DDP exchanges them once in a step."""
    gpu = GPUS["rtx-4090"]
    for strategy, exchanges in (("ddp", 0), ("zero2", 4)):
        few, many = (
            some_case({"gradient_accumulation_steps": count}, processes=2, strategy=strategy) for count in (4, 8)
        )
        more = times(many, gpu, LOW).step_seconds - times(few, gpu, LOW).step_seconds
        once = trained_of(SHAPE, few.way) * few.way.gradient_bytes / 2 / gpu.link
        assert more == pytest.approx(exchanges * once)


def test_fsdp2_gathers_a_layers_experts_and_not_those_of_all_layers() -> None:
    """Qwen3-30B-A3B's sizes: a layer has 1.3 GB."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    text = msgspec.structs.replace(TEXT, hidden_size=2_048, num_hidden_layers=48, **experts)
    shape = ModelShape(text, None, tied=False)
    found = states(shape, some_case(shape=shape, processes=8, strategy="fsdp2").way)
    assert found.weights == pytest.approx(2 * 30.5e9 / 8, rel=0.02)
    assert 3e9 < found.gathered < 4.5e9


def test_offload_is_proposed_for_one_gpu_with_the_main_memory_that_it_needs() -> None:
    found = {one.what: one for one in changes(some_case(tuner="full"), GPUS["a100-80gb"])}
    offload = found["strategy: zero2_offload"]
    assert offload.fits
    assert re.search(r"in \d+ GB of main memory", offload.costs)


def test_more_gpus_train_the_same_rows_in_a_step() -> None:
    (more,) = (one for one in changes(some_case(tuner="full"), SMALL_CARD) if one.what.startswith("processes: "))
    assert more.what == "processes: 8, strategy: zero3, train.gradient_accumulation_steps: 1"


def test_more_gpus_of_each_node_are_proposed_by_the_key_that_they_change() -> None:
    """`processes` are those of a node."""
    found = changes(some_case(tuner="full", nodes=2, processes=1), GPUS["a40"])
    (more,) = (one for one in found if one.what.startswith("processes: "))
    assert more.what == "processes: 2, strategy: zero3, train.gradient_accumulation_steps: 4"
    of_all = some_case({"gradient_accumulation_steps": 4}, tuner="full", nodes=2, processes=2, strategy="zero3")
    assert more.memory == needed(of_all)
    assert more.gpu_hours == pytest.approx(4 * times(of_all, GPUS["a40"], LOW).hours)


LARGE = ModelShape(msgspec.structs.replace(TEXT, hidden_size=8_192, num_hidden_layers=64), None, tied=False)
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
    run: dict[str, Any] = {"tuner": "full", "shape": LARGE, "nodes": nodes, "processes": processes}
    more = [one.what for one in changes(some_case(**run), GPUS[gpu]) if one.what.startswith("nodes: ")]
    assert more == ([expected] if expected else [])


def test_machines_are_not_proposed_whose_gpus_cannot_share_rows_evenly() -> None:
    """A run refuses 8 processes with sequence_parallel: 3."""
    rows_of_three = {"sequence_parallel": 3, "attention": "flash_attention_2"}
    found = changes(some_case(rows_of_three, tuner="full", shape=LARGE, processes=3), GPUS["a40"])
    assert not any(one.what.startswith("nodes: ") for one in found)


def test_more_machines_come_before_another_product_with_the_hours_over_their_network() -> None:
    run: dict[str, Any] = {"tuner": "full", "shape": LARGE, "processes": 8, "strategy": "zero3"}
    gpu = GPUS["a40"]
    more, product = (one for one in changes(some_case(**run), gpu) if one.what.startswith(("nodes: ", "gpu: ")))
    spread = some_case({"gradient_accumulation_steps": 4}, **run, nodes=2)
    assert more.what.startswith("nodes: 2, processes: 8")
    assert more.memory == needed(spread)
    assert more.gpu_hours == pytest.approx(16 * times(spread, gpu, LOW).hours)
    assert product.what == "gpu: a100-80gb"


def test_changes_are_computed_with_the_same_estimate() -> None:
    """Each figure of a change is that of the run with the changed settings."""
    now = {"per_device_batch_size": 2, "gradient_checkpointing": False}
    found = {one.what: one for one in changes(some_case(now), SMALL_CARD)}
    one_row = "train.per_device_batch_size: 1, train.gradient_accumulation_steps: 16"
    assert found[one_row].memory == needed(some_case(now | {"per_device_batch_size": 1}))
    assert found["train.gradient_checkpointing: true"].memory == needed(some_case({"per_device_batch_size": 2}))
    assert found["tuner: qlora"].memory == needed(some_case(now, tuner="qlora"))
    (product,) = (one for one in found.values() if one.what.startswith("gpu: "))
    assert product.memory == needed(some_case(now)) <= 0.9 * GPUS[product.gpu].memory
    assert all(one.memory < needed(some_case(now)) or one.gpu != SMALL_CARD.name for one in found.values())


def test_the_cheapest_change_comes_first() -> None:
    case = some_case({"per_device_batch_size": 2}, tuner="full", processes=2)
    order = [one.what.partition(":")[0] for one in changes(case, GPUS["a100-80gb"])]
    expected = ["train.per_device_batch_size", *["strategy"] * 5, "processes"]
    assert [name for name in order if name in expected] == expected


def test_strategies_without_tests_are_not_proposed() -> None:
    found = changes(some_case(tuner="qlora", processes=2), GPUS["rtx-3090"])
    assert not any("strategy" in one.what for one in found)


def test_a_lower_max_length_is_the_highest_that_fits_and_counts_the_rows_it_leaves_out() -> None:
    rows = [(300, 256)] * 50 + [(2_000 + 64 * number, 512) for number in range(10)]
    case = some_case({"max_length": 4_096}, rows=rows)
    tokens = longest_that_fits(case, SMALL_CARD)
    assert tokens % 64 == 0
    assert share(case.with_settings(max_length=tokens), SMALL_CARD) <= FITS
    assert share(case.with_settings(max_length=tokens + 64), SMALL_CARD) > FITS
    (lower,) = (one for one in changes(case, SMALL_CARD) if one.what == f"train.max_length: {tokens}")
    assert lower.rows_left_out == sum(text + picture > tokens for text, picture in rows) > 0
    assert f"{lower.rows_left_out} of 60 rows" in lower.costs


def test_a_max_length_that_leaves_out_most_rows_is_not_proposed() -> None:
    found = changes(some_case({"per_device_batch_size": 4}), SMALL_CARD)
    assert not any("max_length" in one.what for one in found)


def test_products_with_less_memory_come_first() -> None:
    sizes = [gpu.memory for gpu in GPUS.values()]
    assert sizes == sorted(sizes)


def test_two_changes_are_tried_together_where_none_is_enough() -> None:
    rows = [(7_000, 1_000)] * 20
    found = changes(some_case({"per_device_batch_size": 2}, rows=rows), SMALL_CARD)
    fitting = [one.what for one in found if one.fits]
    assert fitting
    assert any(";" in what for what in fitting) or all(not one.fits for one in found if ";" in one.what)


def test_a_smaller_picture_budget_scales_only_larger_pictures() -> None:
    case = some_case(rows=[(100, 1_000), (100, 100)])
    smaller = case.with_settings(image_max_tokens=256)
    assert smaller.train.pictures.tolist() == [256, 100]
    assert smaller.train.text.tolist() == [100, 100]
    several = replace(case, train=RowLengths.of([(100, 2_000, 3), (100, 200, 3)])).with_settings(image_max_tokens=256)
    assert several.train.pictures.tolist() == [768, 200], "the budget is that of each picture"


def test_the_tower_s_attention_is_within_a_picture() -> None:
    work = Work(token=0, token_square=0, logit=0, patch=0, patch_square=1, patches_per_token=4)
    assert work.of(RowLengths.of([(9, 30, 3)])) == work.of(RowLengths.of([(9, 10)] * 3))


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
    assert some_case({"freeze": [PARTS[0]]}).way.trained == frozenset(PARTS[1:])
    assert some_case().way.sharding == Sharding()
    assert np.array_equal(RowLengths.of(ROWS).tokens, np.array([sum(row) for row in ROWS]))
