"""Pictures that are counted by their sizes have the tokens of their whole encoding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from seeing_families import write_llava, write_qwen2_5_vl
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment

SIZES = [(32, 32), (640, 480), (480, 640), (1280, 960), (97, 301), (301, 97), (28, 28), (1000, 60)]

COUNT = """
import json, sys
from swift.dataset import load_dataset
from vlmflow.swift.counted_row import RowCounter
from vlmflow.swift.own_template import own_template

template = own_template(sys.argv[3:])
dataset, _ = load_dataset([sys.argv[1]], strict=True)
whole = list(map(RowCounter(template, whole=True).count, dataset))
small = RowCounter(template, whole=False)
by_size = list(map(small.count, dataset))
open(sys.argv[2], "w").write(json.dumps([whole, by_size, small._of_size.cache_info().currsize]))
"""


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("llava1_5_hf", marks=pytest.mark.slow)])
def test_sizes_give_the_counts_of_whole_encodings(kind: str, tmp_path: Path) -> None:
    base = {"qwen2_5_vl": write_qwen2_5_vl, "llava1_5_hf": write_llava}[kind](tmp_path / "base")
    rows = []
    for number, size in enumerate([*SIZES, *SIZES[:2]]):
        Image.new("RGB", size, "green").save(tmp_path / f"{number}.png")
        turns = [("human", f"<image>\nWhat is it? {'Say it. ' * number}"), ("gpt", "It is red.")]
        if number % 2:
            turns[0] = ("human", f"<image><image>\nWhat is it? {number}")
        spoken = [{"from": speaker, "value": text} for speaker, text in turns]
        images = [f"{number}.png", "0.png"][: 1 + number % 2]
        rows.append(json.dumps({"conversations": spoken, "images": images}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = as_words(template_arguments(base, kind, "default", {"template": kind}))
    env = environment(tmp_path, 256, tmp_path / "cache", 1)
    found = tmp_path / "found.json"
    call = [sys.executable, "-c", COUNT, str(tmp_path / "rows.jsonl"), str(found), *words]
    subprocess.run(call, env=env, cwd=tmp_path, check=True)
    whole, by_size, sizes = json.loads(found.read_text())
    assert by_size == whole
    assert len({tuple(counts) for counts in whole}) > 4
    assert sizes == len(SIZES)
