"""Quantised models: a bfloat16 base out of FP8, and those that are refused, with the next step."""

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8_files import ONE, SCALE, TWO, WEIGHT, Tensors, made_model, random_codes, write
from stages import fetch_model, fetch_model_files
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.fetch.dequantise import E4M3, dequantised, to_bfloat16
from vlmflow.fetch.model_files import CONFIG, INDEX, SINGLE, block_of, refuse_quantised, without_quantisation
from vlmflow.fetch.model_weights import read_header
from vlmflow.fetch.placed import ModelManifest, hash_files, read_model_manifest, read_small_files, tensors_of
from workflow_runs import ROOT


def made_of(folder: Path) -> Path:
    """Return the folder of the bfloat16 base that is made of a model."""
    names = [file.name for file in folder.iterdir()]
    return dequantised(folder.parent / "store", folder, hash_files(folder, names, 2), 2)[0]


def stored(folder: Path) -> Tensors:
    """Return all tensors of a model."""
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        for name, entry in read_header(path).tensors.items():
            bits = path.read_bytes()[entry.begin : entry.end]
            found[name] = entry.dtype, np.frombuffer(bits, np.uint16 if entry.dtype == "BF16" else np.uint8)
            if entry.dtype == "BF16":
                found[name] = entry.dtype, found[name][1].reshape(entry.shape)
                assert entry.begin % 2 == 0, "torch reads such numbers only from even places"
    return found


def test_the_numbers_of_e4m3() -> None:
    """Some of its table 1, in arXiv:2209.05433."""
    known = {0x00: 0, 0x01: 2**-9, 0x07: 7 / 8 * 2**-6, 0x08: 2**-6, 0x38: 1, 0x7E: 448, 0x81: -(2**-9), 0xFE: -448}
    assert {code: float(E4M3[code]) for code in known} == known
    assert list(np.flatnonzero(np.isnan(E4M3))) == [0x7F, 0xFF]
    assert (np.diff(E4M3[:0x7F]) > 0).all()


def test_halves_are_rounded_to_even() -> None:
    """bfloat16 has 7 bits after the point: 2^-8 is half of the step behind 1."""
    half = 2**-8
    values = np.array([1 + half, 1 + 3 * half, 1 + 1.01 * half, 1 + 0.99 * half, -1 - half, 3.39e38], np.float32)
    assert [hex(bits) for bits in to_bfloat16(values)] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80", "0xbf80", "0x7f7f"]


def test_each_number_is_multiplied_by_the_scale_of_its_block(tmp_path: Path) -> None:
    """Also in blocks that the edge cuts, and in experts, which are one tensor; all else keeps its bytes."""
    shards = made_model()
    made = made_of(write(tmp_path / "m", shards))
    source, found = shards[ONE] | shards[TWO], stored(made)
    assert found.keys() == {WEIGHT, "odd", "experts.up", "norm.weight"}
    scales = source[SCALE][1], source["experts.up_scale_inv"][1]
    for row, column in np.ndindex(5, 7):
        value = E4M3[source[WEIGHT][1][row, column]] * scales[0][row // 2, column // 3]
        assert found[WEIGHT][1][row, column] == to_bfloat16(np.array([value]))[0]
    for place in np.ndindex(2, 4, 3):
        value = E4M3[source["experts.up"][1][place]] * scales[1][place[0], place[1] // 2, 0]
        assert found["experts.up"][1][place] == to_bfloat16(np.array([value]))[0]
    assert found["norm.weight"][1].tolist() == [0, 1, 2, 3]
    assert found["odd"][1].tolist() == [0, 1, 2]
    assert (made / "merges.txt").read_text() == "a b\n"
    assert read_json(made / CONFIG) == {"hidden_size": 8}
    places = {WEIGHT: ONE, "odd": ONE, "experts.up": TWO, "norm.weight": TWO}
    assert read_json(made / INDEX) == {"metadata": {"total_size": 2 * 35 + 3 + 2 * 24 + 2 * 4}, "weight_map": places}


def test_files_that_only_the_form_in_fp8_needs_are_left_out(tmp_path: Path) -> None:
    """One of scales alone, and weights that the index does not name."""
    shards = made_model()
    shards["scales.safetensors"] = {SCALE: shards[TWO].pop(SCALE)}
    folder = write(tmp_path / "m", shards)
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    assert {file.name for file in made_of(folder).glob("[!.]*")} == {ONE, TWO, INDEX, CONFIG, "merges.txt"}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_matrix_may_have_one_scale_and_layers_one_for_their_inputs(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scale = np.full(shape, 0.5, np.float16)
    tensors: Tensors = {WEIGHT: ("F8_E4M3", random_codes(5, 7)), SCALE: ("F16", scale)}
    tensors["model.a.activation_scale"] = ("F32", np.ones(1, np.float32))
    found = stored(made_of(write(tmp_path / "m", {SINGLE: tensors}, weight_block_size=None)))
    assert found.keys() == {WEIGHT}
    assert (found[WEIGHT][1] == to_bfloat16(E4M3[tensors[WEIGHT][1]] * np.float32(0.5))).all()


def scaled(*numbers: float, dtype: str = "F32") -> Callable[[dict[str, Tensors]], object]:
    """Change the first numbers of the weight's scales."""

    def change(shards: dict[str, Tensors]) -> None:
        scales = np.ones((3, 3), np.float32)
        scales.flat[: len(numbers)] = numbers
        shards[TWO][SCALE] = (dtype, scales)

    return change


def added(name: str, dtype: str, bits: np.ndarray, shard: str = TWO) -> Callable[[dict[str, Tensors]], object]:
    return lambda shards: shards[shard].update({name: (dtype, bits)})


ONES = np.ones((3, 3), np.float32)
TOO_LARGE = "a number that is infinite in bfloat16 with its scale"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda shards: shards[TWO].pop(SCALE),
            f"{ONE}: tensor {WEIGHT} is in FP8, but .* no scale {SCALE}",
        ),
        (
            lambda shards: shards[ONE].pop(WEIGHT),
            f"{TWO}: tensor {SCALE} is a scale, but .* no tensor {WEIGHT}",
        ),
        (added(WEIGHT, "BF16", np.zeros((5, 7), np.uint16), ONE), f"{SCALE} is a scale, but the model has no tensor"),
        (added("b.activation_scale", "F32", ONES), "b.activation_scale is a scale, but .* no tensor b.weight in FP8"),
        (added("model.a.weight_scale", "F32", ONES), f"{WEIGHT} has the scale model.a.weight_scale, .* another form"),
        (added("model.a.input_scale", "F32", ONES), f"{WEIGHT} has the scale model.a.input_scale, .* another form"),
        (added(SCALE, "F32", ONES, ONE), f"tensor {SCALE} is also in {ONE}"),
        (added(SCALE, "F32", ONES[:2]), rf"{SCALE} has shape \(2, 3\); for \(5, 7\) and blocks of 2 × 3 .* \(3, 3\)"),
        (added(SCALE, "F32", np.ones((), np.float32)), rf"{SCALE} has shape \(\); for"),
        (added(SCALE, "F8_E8M0", np.ones((3, 3), np.uint8)), f"{SCALE} is F8_E8M0; scales must be F32, BF16 or F16"),
        (added("b" * 1001, "BF16", np.ones(2, np.uint16)), "tensor 'b+ has .* or more than 1,000"),
        (added("b", "F8_E5M2", np.ones(2, np.uint8)), "tensor b is F8_E5M2; only F8_E4M3 can become bfloat16"),
        (added("b", "F8_E4M3", np.ones(2, np.uint8)), r"tensor b is in FP8, but the model has no scale b_scale_inv"),
        (scaled(1, -1), f"{TWO}: tensor {SCALE} holds -1.0; a scale must be a number from 0 on"),
        (scaled(np.nan), f"{SCALE} holds nan"),
        (scaled(1, 1, np.inf), f"{SCALE} holds inf"),
        (scaled(3e38), f"{ONE}: tensor {WEIGHT} holds {TOO_LARGE}"),
        (lambda shards: shards[ONE][WEIGHT][1].__setitem__((4, 6), 0x7F), f"{ONE}: tensor {WEIGHT} holds NaN"),
        (lambda shards: shards[ONE][WEIGHT][1].__setitem__((0, 0), 0xFF), f"{ONE}: tensor {WEIGHT} holds NaN"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensors]], object], said: str
) -> None:
    shards = made_model()
    change(shards)
    with pytest.raises(VlmflowError, match=said):
        made_of(write(tmp_path / "m", shards))
    assert not list((tmp_path / "store" / "bfloat16").glob("*[!tk]")), "nothing whole, nothing that a stage could read"


@pytest.mark.parametrize("shape", [(7,), (0, 7)])
def test_what_has_no_blocks_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors: Tensors = {WEIGHT: ("F8_E4M3", np.ones(shape, np.uint8)), SCALE: ("F32", np.ones(1, np.float32))}
    with pytest.raises(VlmflowError, match=f"{WEIGHT} is in FP8, but has shape .*, and no blocks"):
        made_of(write(tmp_path / "m", {SINGLE: tensors}))


def test_a_model_that_only_says_that_it_is_in_fp8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"has no tensor in FP8, but its config\.json says so"):
        made_of(write(tmp_path / "m", {SINGLE: {"b": ("BF16", np.ones(2, np.uint16))}}))


def test_a_base_is_made_once_and_a_damaged_one_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", made_model())
    made = made_of(folder)
    before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    content = (made / ONE).read_bytes()
    assert made_of(folder) == made
    assert {file.name: file.stat().st_mtime_ns for file in made.iterdir()} == before
    (made / ONE).write_bytes(content[:-1])
    made_of(folder)
    assert (made / ONE).read_bytes() == content
    (made / TWO).unlink()
    made_of(folder)
    assert (made / TWO).is_file()


def test_models_of_one_base_wait_for_each_other(tmp_path: Path) -> None:
    """Two of a configuration may differ in their date alone, and large models take longer than a writer waits."""
    folder = write(tmp_path / "m", made_model())
    made = made_of(folder)
    shutil.rmtree(made)
    with ThreadPoolExecutor(1) as pool:
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            other = pool.submit(made_of, folder)
            with pytest.raises(TimeoutError):
                other.result(0.5)
            assert not made.exists()
        assert other.result(60) == made


def test_both_stages_give_the_same_base(tmp_path: Path) -> None:
    """Lengths and the estimate are made of the small files, before the weights are there."""
    folder = write(tmp_path / "m", made_model())
    common: dict[str, Any] = {"source": str(folder), "store": tmp_path / "store", "dequantize": True}
    fetch_model.main(model=tmp_path / "models" / "m", **common)
    fetch_model_files.main(files=tmp_path / "model_files" / "m", **common)
    manifest = read_model_manifest(tmp_path / "models" / "m")
    small = read_small_files(tmp_path / "model_files" / "m")
    assert (manifest.folder / CONFIG).read_bytes() == (small / CONFIG).read_bytes()
    assert read_json(manifest.folder / INDEX)["weight_map"] == read_json(small / INDEX)["weight_map"]
    assert tensors_of(tmp_path / "model_files" / "m") == sorted(stored(manifest.folder))
    recorded = manifest.dequantized_from
    assert (recorded.folder, recorded.files.keys()) == (folder, {file.name for file in folder.iterdir()})
    assert recorded.digest != manifest.digest

    (folder / CONFIG).write_text("{}")
    with pytest.raises(VlmflowError, match="the base is not quantised"):
        fetch_model.main(model=tmp_path / "models" / "m", **common)
    fetch_model.main(model=tmp_path / "models" / "m", **common | {"dequantize": False})
    plain = read_account(tmp_path / "models" / "m" / "manifest.json", ModelManifest)
    assert not plain.dequantized_from
    assert "dequantized_from" not in (tmp_path / "models" / "m" / "manifest.json").read_text()


def test_no_torch_is_needed() -> None:
    """The image that fetches models has none."""
    code = "import sys; sys.modules['torch'] = None; from stages import fetch_model, fetch_model_files"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", check=True)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def config(folder: Path, quantisation: Any, part: str | None = None) -> Path:
    """Write a config.json, and return it. part: the part that says how the model is quantised."""
    said = {"quantization_config": quantisation}
    file = folder / "config.json"
    file.write_text(json.dumps({"a": 1, **({part: said | {"b": 2}} if part else said)}))
    return file


def refusal(file: Path, source: str = "", *, dequantize: bool = False) -> str:
    with pytest.raises(VlmflowError) as error:
        refuse_quantised(file, source, dequantize=dequantize)
    return str(error.value)


def test_fp8_needs_the_key_and_the_unquantised_model_is_named(tmp_path: Path) -> None:
    said = refusal(config(tmp_path, FP8), "hf://Qwen/Qwen3-8B-FP8@" + "0" * 40)
    assert "config.json: the base is quantised (fp8)" in said
    assert "set models.NAME.dequantize: true" in said
    assert "or use hf://Qwen/Qwen3-8B, the model that was quantised" in said
    assert "or use the unquantised model as" in refusal(config(tmp_path, FP8), "/models/mine-FP8")


@pytest.mark.parametrize("part", [None, "text_config"])
def test_with_the_key_it_is_taken(tmp_path: Path, part: str | None) -> None:
    file = config(tmp_path, FP8, part)
    refuse_quantised(file, dequantize=True)
    assert block_of(file) == (128, 128)
    assert without_quantisation(file) == ({"a": 1, part: {"b": 2}} if part else {"a": 1})
    assert block_of(config(tmp_path, {"quant_method": "fp8"})) == (128, 128), "transformers' default"
    assert block_of(config(tmp_path, {"quant_method": "fp8", "weight_block_size": None})) is None


@pytest.mark.parametrize(
    ("method", "source", "unquantised"),
    [
        ("compressed-tensors", "/models/mine", None),
        ("gptq", "hf://Qwen/Qwen3-8B-GPTQ-Int4", "Qwen/Qwen3-8B"),
        ("awq", "hf://Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B"),
        ("bitsandbytes", "hf://unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("mxfp4", "hf://openai/gpt-oss-20b", None),
        ("fbgemm_fp8", "/models/Llama-3.2-1B-Instruct-FP8", "meta-llama/Llama-3.2-1B-Instruct"),
        ("mxfp8", "", None),
    ],
)
def test_other_forms_stay_refused(tmp_path: Path, method: str, source: str, unquantised: str | None) -> None:
    for dequantize in (False, True):
        said = refusal(config(tmp_path, {"quant_method": method}), source, dequantize=dequantize)
        assert f"the base is quantised ({method})" in said
        assert "dequantize: true" not in said
        assert (f"use hf://{unquantised}, the model" if unquantised else "use the unquantised model as") in said
    assert "only FP8 (fp8) can become bfloat16" in said


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        (None, r"the base is not quantised, and models\.NAME\.dequantize is for bases in FP8"),
        ({}, "the base is not quantised"),
        *(
            (FP8 | {"weight_block_size": block}, "weight_block_size = .* is not two numbers above 0")
            for block in ([128], [0, 128], [128, -1], [1.5, 2], [True, 2], "128", 128, {"a": 1})
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, quantisation: Any, said: str) -> None:
    with pytest.raises(VlmflowError, match=said):
        refuse_quantised(config(tmp_path, quantisation), dequantize=True)


def test_two_descriptions_must_be_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    both = {"quantization_config": FP8, "text_config": {"quantization_config": FP8 | {"weight_block_size": None}}}
    file.write_text(json.dumps(both))
    assert "quantization_config and text_config.quantization_config differ" in refusal(file, dequantize=True)
