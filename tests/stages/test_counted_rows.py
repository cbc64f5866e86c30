"""Pictures that are counted by their sizes have the tokens of their whole encoding."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from seeing_families import SEEING
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment

SIZES = [(32, 32), (640, 480), (480, 640), (1280, 960), (97, 301), (301, 97), (28, 28), (1000, 60)]
MANY = [*SIZES, *((Random(n).randint(28, 1400), Random(-n).randint(28, 1400)) for n in range(1, 193))]
"""200 sizes, in pixels."""

COUNT = """
import json, sys
from swift.dataset import load_dataset
from vlmflow.swift.row_counter import RowCounter
from vlmflow.swift.own_template import own_template

template = own_template(sys.argv[3:])
dataset, _ = load_dataset([sys.argv[1]], strict=True)
whole = list(map(RowCounter(template, whole=True).count, dataset))
small = RowCounter(template, whole=False)
by_size = list(map(small.count, dataset))
open(sys.argv[2], "w").write(json.dumps([whole, by_size, small._of_size.cache_info().currsize]))
"""


@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("qwen2.5-vl", SIZES, 256),
        *(pytest.param(name, MANY, most, marks=pytest.mark.slow) for name in SEEING for most in (16, 2048)),
    ],
)
def test_sizes_give_the_counts_of_whole_encodings(
    name: str, sizes: list[tuple[int, int]], most: int, tmp_path: Path
) -> None:
    family = SEEING[name]
    base = family.write(tmp_path / "base")
    rows = []
    for number, size in enumerate([*sizes, *sizes[:2]]):
        Image.new("RGB", size, "green").save(tmp_path / f"{number}.png")
        turns = [("human", f"<image>\nWhat is it? {'Say it. ' * number}"), ("gpt", "It is red.")]
        if number % 2:
            turns[0] = ("human", f"<image><image>\nWhat is it? {number}")
        spoken = [{"from": speaker, "value": text} for speaker, text in turns]
        images = [f"{number}.png", "0.png"][: 1 + number % 2]
        rows.append(json.dumps({"conversations": spoken, "images": images}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = as_words(template_arguments(base, family.model_type, "default", {"template": family.template}))
    env = environment(tmp_path, most, tmp_path / "cache", 1)
    found = tmp_path / "found.json"
    call = [sys.executable, "-c", COUNT, str(tmp_path / "rows.jsonl"), str(found), *words]
    subprocess.run(call, env=env, cwd=tmp_path, check=True)
    whole, by_size, counted = json.loads(found.read_text())
    assert by_size == whole
    assert counted == len(set(sizes) | {(32, 32)})
