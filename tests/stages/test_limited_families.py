"""The picture limits of models other than Qwen-VL: no picture takes more tokens, in training and as published."""

import re
import shutil
from pathlib import Path
from random import Random

import pytest
from PIL import Image
from transformers import AutoProcessor

from seeing_families import SEEING
from training_rows import made_row
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.lengths.measure import TemplateCounter
from vlmflow.merging.proof import publish_limits
from vlmflow.pictures.budget import PictureBudget
from vlmflow.rows.chat import Turn
from vlmflow.serving.finished_run import link_served
from vlmflow.swift.child_process import environment

FEWEST = {"internvl": 4, "mistral3": 2}
"""The tokens that a picture takes at least: a tile; a square with the end of its line."""

DRAWN = 200
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
