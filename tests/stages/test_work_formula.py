"""The estimate's formula of operations, beside what PyTorch counts in a real training step."""

import json

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from made_inputs import changed, some_inputs
from vlmflow.estimate.run import RowLengths
from vlmflow.estimate.shape import read_shape
from vlmflow.estimate.times import training

WIDTH, RANK, LAYERS, VOCABULARY = 256, 16, 3, 512
START, PAD, END = 508, 509, 510
"""The ids of a picture's tokens."""

SIDE = 8
"""Patches of the picture's side; four patches are one token."""

DECODER_LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
"""The meaning of ms-swift's all-linear if vision tower and aligner are frozen."""


def small_model(folder):
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 512,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4]},
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        image_token_id=PAD,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    config.save_pretrained(folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    adapter = LoraConfig(r=RANK, target_modules=DECODER_LAYERS, task_type="CAUSAL_LM")
    return get_peft_model(model, adapter).train()


def test_the_formula_is_what_pytorch_counts(tmp_path):
    """Compare every multiplication of one training step, forward and backward, with the documented formula."""
    model = small_model(tmp_path)
    pads = SIDE * SIDE // 4
    ids = torch.tensor([[START, *[PAD] * pads, END, *range(60)]])
    tokens, trained = ids.numel(), 40
    is_picture = (ids == PAD).int()
    with FlopCounterMode(display=False) as counter:
        plain = model.get_base_model()
        states = plain.model(
            input_ids=ids,
            mm_token_type_ids=is_picture,
            pixel_values=torch.randn(SIDE * SIDE, 3 * 2 * 16 * 16),
            image_grid_thw=torch.tensor([[1, SIDE, SIDE]]),
            use_cache=False,
        ).last_hidden_state
        plain.lm_head(states[:, -trained:]).logsumexp(-1).sum().backward()
    inputs = some_inputs({"lora": {"rank": RANK}}, shape=read_shape(tmp_path))
    work = training(inputs.shape, changed(inputs.mode, gradient_checkpointing=False))
    future = work.token_square * tokens**2  # eager attention also computes the half that it masks
    first_inputs = 2 * tokens * ((4 + 2 + 2) * 32 * WIDTH + 3 * RANK * WIDTH)  # no gradient of q, k, v's input
    counted = work.of(RowLengths.of([(tokens - pads, pads, trained)]))
    assert counter.get_total_flops() == counted + future - first_inputs
