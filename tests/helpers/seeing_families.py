"""Small base models that see, of other families than Qwen3-VL: layout, marks and processor are those of published ones.

Some token numbers stand in ms-swift's templates, so the tokenizers have them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    Mistral3Config,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLMoeConfig,
)

from families import CHATML_TOKENS, GEMMA_TOKENS, made_tokenizer
from vlmflow.demo.tiny_model import CHAT_TEMPLATE, embedding_rows, write_tokenizer
from vlmflow.fetch.chat_templates import added_tokens

TINY_TEXT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_qwen2_5_vl(folder: Path) -> Path:
    """Write a Qwen2.5-VL, whose picture limits are `min_pixels` and `max_pixels`, and return its folder."""
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    ids = write_tokenizer(folder, ["What colour is the square? It is red, and so is the other one."], 40)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
    text = TINY_TEXT | HEADS | {"vocab_size": embedding_rows(ids), "rope_parameters": rope}
    text |= {"tie_word_embeddings": False}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    limits = {"min_pixels": 3136, "max_pixels": 12_845_056}
    _write_qwen_processor(folder, "Qwen2_5_VLProcessor", 14, limits)
    return folder


def write_qwen3_vl_moe(folder: Path, inner: int = 40) -> Path:
    """Write a Qwen3-VL with four experts per layer, `inner` wide, in the hub's layout: their matrices are transposed.

    Returns its folder.
    """
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    ids = write_tokenizer(folder, ["What colour is the square? It is red, and so is the other one."], 40)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
    text = TINY_TEXT | HEADS | {"vocab_size": embedding_rows(ids), "rope_parameters": rope, "head_dim": 12}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": inner, "tie_word_embeddings": False}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        as_on_hub = {name: one.mT.contiguous() if ".experts." in name else one for name, one in tensors.items()}
        save_file(as_on_hub, file, {"format": "pt"})
    limits = {"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}}
    _write_qwen_processor(folder, "Qwen3VLProcessor", 16, limits, video="Qwen3VLVideoProcessor")
    return folder


def _write_qwen_processor(
    folder: Path, name: str, patch: int, limits: dict[str, object], video: str = "Qwen2VLVideoProcessor"
) -> None:
    common = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "processor_class": name}
    common |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | limits
    for file, kind, which in (
        ("preprocessor", "image_processor", "Qwen2VLImageProcessor"),
        ("video_preprocessor", "video_processor", video),
    ):
        (folder / f"{file}_config.json").write_text(json.dumps(common | {f"{kind}_type": which}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))


def write_llava(folder: Path) -> Path:
    """Write a LLaVA 1.5, whose pictures have a fixed number of tokens (4), and return its folder."""
    torch.manual_seed(1)
    tokenizer = made_tokenizer(("<s>", "<unk>", "<image>", "</s>"))
    text = LlamaConfig(**TINY_TEXT, **HEADS, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1)
    vision = CLIPVisionConfig(**TINY_TEXT, num_attention_heads=4, image_size=28, patch_size=14, projection_dim=48)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image, image_seq_length=4)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    scale = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    LlavaProcessor(
        image_processor=CLIPImageProcessor(**scale),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=WITH_PICTURES,
        image_token="<image>",  # noqa: S106 (a mark)
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


WITH_PICTURES = """\
{%- for message in messages -%}
{{- 'USER: ' if message.role == 'user' else 'ASSISTANT: ' if message.role == 'assistant' else '' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- '<image>\\n' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '</s>' if message.role == 'assistant' else ' ' -}}
{%- endfor -%}
"""


def write_qwen3_5(folder: Path) -> Path:
    """Write a Qwen3.5, whose first layer attends linearly, and return its folder."""
    torch.manual_seed(1)
    ids = {"vision_start": 248_053, "vision_end": 248_054, "image": 248_056, "video": 248_057}
    words = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    placed = {words.get(name, f"<|{name}|>"): number for name, number in ids.items()}
    tokenizer = made_tokenizer(CHATML_TOKENS, placed)
    tokenizer.save_pretrained(folder)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.25}
    text = TINY_TEXT | HEADS | {"vocab_size": 248_058, "rope_parameters": rope, "head_dim": 24}
    text |= {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16}
    text |= {"linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"num_position_embeddings": 16}
    numbers = {f"{name}_token_id": number for name, number in ids.items()}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **numbers)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    limits = {"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}}
    _write_qwen_processor(folder, "Qwen3VLProcessor", 16, limits, video="Qwen3VLVideoProcessor")
    return folder


def write_gemma3(folder: Path) -> Path:
    """Write a Gemma 3, whose pictures have a fixed number of tokens (4), and return its folder."""
    torch.manual_seed(1)
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    placed = {"<start_of_image>": 255_999, "<end_of_image>": 256_000, "<image_soft_token>": 256_001}
    tokenizer = made_tokenizer(GEMMA_TOKENS, placed, **named)
    text = TINY_TEXT | HEADS | {"vocab_size": 256_002, "head_dim": 12}
    vision = TINY_TEXT | {"num_attention_heads": 4, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    ids = {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 256_001}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    processor = Gemma3ImageProcessor(size={"height": 28, "width": 28})
    Gemma3Processor(processor, tokenizer, chat_template=WITH_PICTURES, image_seq_length=4).save_pretrained(folder)
    return folder


def write_internvl(folder: Path) -> Path:
    """Write an InternVL 3.5, whose pictures are cut into tiles of four tokens each, and return its folder."""
    torch.manual_seed(1)
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    named |= {"video_token": "<video>"}
    tokenizer = made_tokenizer((*CHATML_TOKENS[:3], *named.values(), "<|im_end|>"), **named)
    text = TINY_TEXT | HEADS | {"vocab_size": len(tokenizer), "model_type": "qwen3", "head_dim": 12}
    vision = TINY_TEXT | {"num_attention_heads": 4, "image_size": [56, 56], "patch_size": [14, 14]}
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = InternVLConfig(text_config=text, vision_config=vision, image_token_id=image, image_seq_length=4)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    scale = {"size": {"height": 56, "width": 56}}
    processor = GotOcr2ImageProcessor(**scale, crop_to_patches=False, max_patches=12)
    how = {"image_seq_length": 4, "chat_template": WITH_PICTURES}
    InternVLProcessor(processor, tokenizer, InternVLVideoProcessor(**scale), **how).save_pretrained(folder)
    return folder


def write_llava_onevision(folder: Path) -> Path:
    """Write a LLaVA-OneVision, which looks at a picture as a whole and in tiles, and return its folder."""
    torch.manual_seed(1)
    named = {"image_token": "<image>", "video_token": "<video>"}
    tokenizer = made_tokenizer((*CHATML_TOKENS, "<video>", "<|im_end|>"), {"<image>": 151_646}, **named)
    text = TINY_TEXT | HEADS | {"vocab_size": 151_647, "model_type": "qwen2"}
    vision = TINY_TEXT | {"num_attention_heads": 4, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    vision |= {"model_type": "siglip_vision_model"}
    tiles = [[28, 28], [28, 56], [56, 28], [56, 56]]
    ids = {"image_token_id": 151_646, "video_token_id": tokenizer.convert_tokens_to_ids("<video>")}
    config = LlavaOnevisionConfig(text_config=text, vision_config=vision, image_grid_pinpoints=tiles, **ids)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    scale = {"size": {"height": 28, "width": 28}}
    LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(**scale, image_grid_pinpoints=tiles),
        tokenizer,
        LlavaOnevisionVideoProcessor(**scale),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=WITH_PICTURES,
    ).save_pretrained(folder)
    return folder


def write_mistral3(folder: Path) -> Path:
    """Write a Mistral Small 3.1, and return its folder."""
    torch.manual_seed(1)
    special = ("<s>", "<unk>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG_BREAK]", "[IMG_END]")
    tokenizer = made_tokenizer((*special, "</s>"), {"[IMG]": 10}, image_token="[IMG]")  # noqa: S106 (a mark)
    text = TINY_TEXT | HEADS | {"vocab_size": len(tokenizer) + 300, "model_type": "mistral", "head_dim": 12}
    vision = TINY_TEXT | {"num_attention_heads": 4, "head_dim": 12, "image_size": 112, "patch_size": 14}
    vision |= {"model_type": "pixtral"}
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_id=10, spatial_merge_size=2)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    PixtralProcessor(
        PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}),
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=WITH_PICTURES,
    ).save_pretrained(folder)
    return folder


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="60KB")


class SeeingFamily(NamedTuple):
    """model_type, template: ms-swift's names. write_files: writes the model to a folder and returns it."""

    model_type: str
    template: str
    write_files: Callable[[Path], Path]

    def write(self, folder: Path) -> Path:
        """Write the model, which stops at its tokenizer's end of an answer, as published ones do; return its folder."""
        self.write_files(folder)
        end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
        file = folder / "generation_config.json"
        generation = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(generation | {"eos_token_id": added_tokens(folder)[end]}))
        return folder


SEEING = {
    "qwen2.5-vl": SeeingFamily("qwen2_5_vl", "qwen2_5_vl", write_qwen2_5_vl),
    "qwen3-vl-moe": SeeingFamily("qwen3_vl_moe", "qwen3_vl", write_qwen3_vl_moe),
    "qwen3.5": SeeingFamily("qwen3_5", "qwen3_5", write_qwen3_5),
    "llava": SeeingFamily("llava1_5_hf", "llava1_5_hf", write_llava),
    "llava-onevision": SeeingFamily("llava_onevision_hf", "llava_onevision_hf", write_llava_onevision),
    "gemma3": SeeingFamily("gemma3_vision", "gemma3_vision", write_gemma3),
    "internvl": SeeingFamily("internvl", "internvl_hf", write_internvl),
    "mistral3": SeeingFamily("mistral3", "mistral_2503", write_mistral3),
}
