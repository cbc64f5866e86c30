"""The picture limits that travel with the weights: the published processor sees what the trainer saw."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from transformers import AutoImageProcessor, AutoProcessor

from made_rows import made_row
from seeing_families import SEEING
from vlmflow.config.settings import PictureLimits
from vlmflow.core.files import sha256_of
from vlmflow.demo.tiny_model import PIXELS_PER_TOKEN
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.lengths.measure import TemplateCounter
from vlmflow.merging.proof import publish_limits, take_over
from vlmflow.pictures.budget import PictureBudget
from vlmflow.pictures.decode import check_picture
from vlmflow.rows.chat import Turn
from vlmflow.serving.finished_run import link_served
from vlmflow.swift.child_process import environment
from workflow_runs import ROOT

QUESTION, ANSWER = "\nHow many?", "Two."

OF_QWEN = {"longest_edge": 16_777_216, "shortest_edge": 65_536}
"""The limits in Qwen3-VL's own file."""

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": OF_QWEN,
}
"""The content of that file."""

SIDE = int(PIXELS_PER_TOKEN**0.5)

EXTREMES = [(28, 28), (28, 5600), (5600, 28), (29, 5799), (28, 100), (47, 49), (48, 48)]
"""Width and height: the shortest side and the largest aspect that validation admits, and sizes near the smallest."""

EXACT = [(64, 64), (32, 128), (256, 256), (128, 512), (1024, 1024), (1984, 544)]
"""Whole tokens: of the smallest size, and of the largest with 64 and 1,024 tokens, or near it."""

ODD = [(63, 65), (80, 48), (257, 255), (301, 1999), (1023, 1025), (1600, 1200), (1, 1)]


def pictures_in(folder: Path) -> list[Path]:
    """Draw pictures with all the sizes; validation must admit each of them but (1, 1)."""
    folder.mkdir()
    drawn = []
    for width, height in [*EXTREMES, *EXACT, *ODD]:
        file = folder / f"{width}x{height}.png"
        Image.effect_noise((max(1, width // 8), max(1, height // 8)), 90).resize((width, height)).convert("RGB").save(
            file
        )
        if isinstance(check_picture(file.read_bytes(), PictureLimits()), tuple):
            drawn.append(file)
    assert len(drawn) == len(EXTREMES) + len(EXACT) + len(ODD) - 1
    return drawn


def published(base: Path, folder: Path, most_tokens: int) -> Path:
    """Publish a model whose processor file has Qwen's own limits, and return the folder."""
    take_over(base, folder / "verified")
    file = folder / "verified" / "preprocessor_config.json"
    content = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps(content | {"size": OF_QWEN}, indent=2))
    before = sha256_of(file)
    take_over(folder / "verified", folder / "merged")
    limited = publish_limits(folder / "merged", most_tokens)
    assert limited
    assert (limited.proven, limited.published) == (before, sha256_of(folder / "merged" / file.name))
    assert sha256_of(file) == before, "the proven file is another one"
    return folder / "merged"


def by_the_trainer(model: Path, pictures: list[Path], most_tokens: int, scratch: Path) -> list[dict[str, torch.Tensor]]:
    words = [str(model), str(scratch / "made.pt"), QUESTION, ANSWER, *map(str, pictures)]
    script = str(ROOT / "tests" / "helpers" / "trainer_inputs.py")
    env = environment(scratch, most_tokens, scratch / "cache", 1)
    subprocess.run([sys.executable, script, *words], env=env, check=True, cwd=scratch, capture_output=True)
    made: list[dict[str, torch.Tensor]] = torch.load(scratch / "made.pt")
    return made


@pytest.mark.parametrize("most_tokens", [256, 1024])
def test_the_published_processor_sees_what_the_trainer_saw(demo_run: Path, tmp_path: Path, most_tokens: int) -> None:
    base = demo_run / "tiny-model"
    merged = published(base, tmp_path, most_tokens)
    pictures = pictures_in(tmp_path / "pictures")
    processor = AutoProcessor.from_pretrained(merged)
    mean, std = (torch.tensor(getattr(processor.image_processor, name)) for name in ("image_mean", "image_std"))
    assert len(set(std.tolist())) == len(set(mean.tolist())) == 1, "so a difference of pixels needs no channel"
    worst = 0.0
    for file, trained in zip(pictures, by_the_trainer(base, pictures, most_tokens, tmp_path), strict=True):
        with Image.open(file) as picture:
            turns = [
                {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]},
                {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
            ]
            seen = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
            size = picture.size
        assert seen["image_grid_thw"].tolist() == trained["image_grid_thw"].tolist(), file.name
        grid = seen["image_grid_thw"][0]
        assert 4 <= int(grid.prod()) // 4 <= most_tokens, file.name
        assert _without_end(seen["input_ids"][0].tolist(), processor) == _without_end(trained["input_ids"], processor)
        apart = float((seen["pixel_values"] - trained["pixel_values"]).abs().max() * std[0] * 255)
        patch = SIDE // 2
        if size == (int(grid[2]) * patch, int(grid[1]) * patch):
            assert apart < 1e-3, f"{file.name}: nothing is scaled"
        worst = max(worst, apart)
    print(f"largest difference of a pixel: {worst:.2f} of 255")
    assert 0 < worst < 3.01


def test_pictures_of_black_and_white_pixels_are_scaled_nearly_alike(tmp_path: Path) -> None:
    """They are where torchvision, transformers' default backend, differs most from Pillow, the trainer's.

    It scales along the two sides in another order, which shows where one is scaled up and the other down: up to 30 of
    255 levels. With transformers' other backend, Pillow, no level differs.
    """
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN))
    assert publish_limits(tmp_path, 256)
    default, pillow = (
        AutoImageProcessor.from_pretrained(tmp_path, backend=backend) for backend in ("torchvision", "pil")
    )
    for width, height, most in ((63, 65, 30), (28, 28, 2), (640, 480, 2), (28, 5600, 2), (64, 64, 0)):
        picture = Image.effect_noise((width, height), 90).convert("1").convert("RGB")
        high, wide = smart_resize(height, width, SIDE, 4 * PIXELS_PER_TOKEN, 256 * PIXELS_PER_TOKEN)
        trained = default(picture.resize((wide, high)), do_resize=False, return_tensors="pt")["pixel_values"]
        for processor, allowed in ((default, most), (pillow, 0)):
            seen = torch.as_tensor(processor(picture, return_tensors="pt")["pixel_values"])
            assert float((seen - trained).abs().max() * 127.5) <= allowed + 1e-3, (width, height, allowed)


def _without_end(tokens: list[int], processor) -> list[int]:
    """Return tokens up to the end of the answer: the chat template of the model closes with a line break more."""
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    return tokens[: len(tokens) - tokens[::-1].index(end)]


FEWEST = {"internvl": 4, "mistral3": 2}
"""The tokens that a picture takes at least: a tile; a square with the end of its line."""

DRAWN = 40
SIDES = 17, 900
TURNS = [Turn("human", "<image>"), Turn("gpt", "It is red.")]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of random sizes, and the extremes."""
    folder, random = tmp_path_factory.mktemp("pictures"), Random(5)
    sizes = [(random.randint(*SIDES), random.randint(*SIDES)) for _ in range(DRAWN)]
    for number, size in enumerate([*sizes, (17, 17), (900, 900), (900, 17), (17, 900), (2000, 2000)]):
        Image.new("RGB", size, (number, 0, 0)).save(folder / f"{number}.png")
    return folder


def wide(name: str, folder: Path) -> Path:
    """Write a model whose own limits are those of published ones: they are above the run's."""
    model = SEEING[name].write(folder)
    file = model / "processor_config.json"
    file.write_text(re.sub(r'"longest_edge": 112\b', '"longest_edge": 1540', file.read_text()))
    return model


def in_training(name: str, model: Path, pictures: Path, most: int, scratch: Path, *, whole: bool) -> list[int]:
    """Return the tokens of each picture, with the ends of its lines, as ms-swift's template of the model counts."""
    family = SEEING[name]
    arguments = template_arguments(model, family.model_type, "default", {"template": family.template})
    scratch.mkdir(parents=True)
    counter = TemplateCounter(arguments, environment(pictures, most, scratch / "cache", 1), scratch, whole=whole)
    files = sorted(pictures.iterdir(), key=lambda file: int(file.stem))
    rows = [made_row(file.stem, TURNS, images=[file.name]) for file in files]
    counted = counter.measure(rows)
    text = min(one.text for one in counted) - (name == "mistral3")  # a picture of one line has one end
    return [one.pictures + one.text - text for one in counted]


def as_loaded(folder: Path, pictures: Path) -> list[int]:
    """Return the same of the processor that transformers loads from a folder."""
    processor = AutoProcessor.from_pretrained(folder)
    marks = {getattr(processor, f"image_{kind}token_id", None) for kind in ("", "break_", "end_")}
    tokens = []
    for file in sorted(pictures.iterdir(), key=lambda file: int(file.stem)):
        with Image.open(file) as picture:
            ids = processor(images=[picture], text=processor.image_token)["input_ids"][0]
        tokens.append(sum(int(each) in marks for each in ids))
    return tokens


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param(name, most, marks=[] if (name, most) == ("internvl", 16) else [pytest.mark.slow])
        for name in FEWEST
        for most in (16, 64, 256, 1024, 2048)
    ],
)
def test_no_picture_takes_more_tokens_and_the_published_folder_says_the_same(
    name: str, most: int, pictures: Path, tmp_path: Path
) -> None:
    base = wide(name, tmp_path / "base")
    trained = in_training(name, base, pictures, most, tmp_path / "scratch", whole=True)
    assert max(trained) == PictureBudget.of(base, most).most <= max(most, FEWEST[name])
    assert trained == in_training(name, base, pictures, most, tmp_path / "by-size", whole=False)
    shutil.copytree(base, tmp_path / "merged")
    limited = publish_limits(tmp_path / "merged", most)
    assert limited is not None
    of_both = [PictureBudget.of(folder, most).left_to_processor for folder in (base, tmp_path / "merged")]
    assert of_both == [limited.limits.by_key()] * 2
    assert as_loaded(tmp_path / "merged", pictures) == trained
    link_served(base, tmp_path / "served", most)
    assert as_loaded(tmp_path / "served", pictures) == trained
