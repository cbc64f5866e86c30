"""The proof by logits, on a tiny Qwen3-VL with pictures and a tiny Qwen3 without."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from made_rows import made_row
from tiny_models import file_names, randomise
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.in_trainer.messages import POSITIONS
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.merging.logits import inputs_of
from vlmflow.merging.merge import merge_weights
from vlmflow.merging.proof import LogitProof
from vlmflow.merging.verify_logits import verify_logits, verify_stored_logits
from vlmflow.merging.verify_tensors import verify_tensors
from vlmflow.rows.chat import Turn, messages_of
from vlmflow.swift.row_attention import Inputs
from workflow_runs import ROOT

TEXTS = ["What colour is the square in the picture?", "The square is red.", "Wrong.", "It is green, I see now."]
SPEAKERS = ("human", "gpt", "human", "gpt")
TEXT_ROW = made_row("text", [Turn(speaker, text) for speaker, text in zip(SPEAKERS, TEXTS, strict=True)])
ROW = made_row("row", [Turn("human", f"<image>\n{TEXTS[0]}"), *TEXT_ROW.conversations[1:]], images=["square.png"])


def write_run(folder: Path, vision: bool, update: float = 0.1, stored: str = "auto") -> Path:
    """A base, an adapter that changes its logits, their merge, and a picture. stored: their base's type."""
    base = folder / "base"
    write_tiny_model(base, TEXTS, TinyShape(hidden_size=128), seed=1, vision=vision)
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    torch.manual_seed(2)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=r".*(?<!visual).*\.(q_proj|v_proj|up_proj|down_proj)")
    whole = auto.from_pretrained(base, dtype=stored)
    if stored != "auto":
        whole.save_pretrained(base)
        (base / "model.safetensors.index.json").unlink()  # two shards before, one file now
        for shard in base.glob("model-*-of-*.safetensors"):
            shard.unlink()
    model = get_peft_model(whole, lora)
    randomise(model, update)
    model.save_pretrained(folder / "adapter")
    merge_weights(base, folder / "adapter", folder / "merged", file_names(base), 2)
    Image.new("RGB", (96, 64), "green").save(folder / "square.png")
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("seeing"), vision=True)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("reading"), vision=False)


@pytest.fixture(scope="module")
def seen(seeing: Path) -> list[Inputs]:
    """A row with a picture and a row without, in the merged folder's processor."""
    return inputs_of([ROW, TEXT_ROW], template_arguments(seeing / "merged", "qwen3_vl", "default", {}), seeing, 64)


def said(folder: Path) -> list[Inputs]:
    """The inputs of the row without a picture."""
    messages, how = messages_of(TEXT_ROW.conversations, []), {"return_dict": True, "return_tensors": "pt"}
    return [dict(AutoTokenizer.from_pretrained(folder / "base").apply_chat_template(messages, tokenize=True, **how))]


def verify(folder: Path, merged: Path, inputs: list[Inputs] | None = None, dtype: str = "float32") -> LogitProof:
    return verify_logits(folder / "base", folder / "adapter", merged, inputs or said(folder), "cpu", dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_answers_as_base_and_adapter(seeing: Path, seen: list[Inputs], dtype: str) -> None:
    """On a row with a picture and a row without."""
    assert ["pixel_values" in row for row in seen] == [True, False]
    proof = verify(seeing, seeing / "merged", seen, dtype)
    assert proof.verdict == "agree"
    assert (proof.rows, proof.dtype, proof.device) == (2, dtype, "cpu")
    assert proof.positions > 40
    assert proof.deviation < proof.allowed_deviation / 2
    assert proof.effect > 10 * proof.deviation
    assert proof.effect_found == pytest.approx(1, abs=0.1)
    assert proof.top1_agreement > 0.8


def test_model_without_pictures(reading: Path) -> None:
    arguments = template_arguments(reading / "merged", "qwen3", "default", {"template": "qwen3_nothinking"})
    inputs = inputs_of([TEXT_ROW], arguments, reading, 64)
    assert verify(reading, reading / "merged", inputs).effect_found == pytest.approx(1, abs=0.1)


def changed_copy(folder: Path, to: Path, change: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the merged folder with every tensor changed; the change gets name, merged and base."""
    merged = shutil.copytree(folder / "merged", to)
    for path in merged.glob("*.safetensors"):
        base = load_file(folder / "base" / path.name)
        tensors = {name: change(name, tensor, base[name]) for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    return merged


def test_merged_nothing(reading: Path) -> None:
    """The base itself does not pass as a merge."""
    with pytest.raises(VlmflowError, match=r"base: the logits of the merged weights, .*(differ by|show 0\.00 times)"):
        verify(reading, reading / "base")


def test_merged_twice(reading: Path, tmp_path: Path) -> None:
    """The update at twice its scale."""
    merged = changed_copy(reading, tmp_path / "m", lambda _, tensor, base: (2 * tensor.float() - base).bfloat16())
    with pytest.raises(VlmflowError, match=r"(differ by|show \S+ times the adapter's effect)"):
        verify(reading, merged)


def test_small_effect_that_was_not_merged(tmp_path: Path) -> None:
    """If rounding would hide the effect, its direction is checked."""
    folder = write_run(tmp_path, vision=False, update=0.004)
    proof = verify(folder, folder / "merged", dtype="bfloat16")
    assert proof.effect < proof.allowed_deviation
    with pytest.raises(VlmflowError, match=r"show -?0\.\d\d times the adapter's effect"):
        verify(folder, folder / "base", dtype="bfloat16")


LAYER = "model.layers.1.self_attn.q_proj.weight"
FAULTS: dict[str, Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "doubled": lambda _, merged, base: 2 * merged - base,
    "lost": lambda _, merged, base: base,
    "transposed": lambda _, merged, base: base + (merged - base).reshape(len(base), -1).T.reshape(base.shape),
    "one layer left out": lambda name, merged, base: base if name == LAYER else merged,
}
SHORT = 0.0014
"""An update as after four steps: it changes weights by about one step of bfloat16."""


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def short(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = write_run(tmp_path_factory.mktemp("short"), vision=False, update=SHORT, stored=request.param)
    return folder, request.param


def test_a_short_run_whose_effect_rounding_hides_is_inconclusive(short: tuple[Path, str]) -> None:
    """A correct merge of 4 steps at 1e-4 was refused: rounding explains the difference, and the tensors decide."""
    folder, dtype = short
    verify_tensors(folder / "base", folder / "adapter", folder / "merged", file_names(folder / "base"), 2)
    proof = verify(folder, folder / "merged", dtype=dtype)
    assert proof.effect_found == pytest.approx(proof.effect_rounded, abs=0.05)
    assert proof.verdict == ("inconclusive" if dtype == "bfloat16" else "agree")
    assert (proof.effect_rounded < 0.75) == (dtype == "bfloat16")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_merge_of_a_short_run_is_refused(short: tuple[Path, str], fault: str, tmp_path: Path) -> None:
    """The tensors show every case; the logits show a doubled or lost adapter."""
    folder, dtype = short
    kept = getattr(torch, dtype)

    def change(name: str, merged: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return FAULTS[fault](name, merged.float(), base.float()).to(kept)

    merged = changed_copy(folder, tmp_path / "m", change)
    with pytest.raises(VlmflowError, match="ulps away"):
        verify_tensors(folder / "base", folder / "adapter", merged, file_names(folder / "base"), 2)
    if fault in ("doubled", "lost"):
        with pytest.raises(VlmflowError, match=r"times the adapter's effect|differ by"):
            verify(folder, merged, dtype=dtype)


def test_weights_stored_finer_than_they_are_computed_with(tmp_path: Path) -> None:
    """Their rounding cannot be repeated in the type of the computation, so the logits give no verdict."""
    folder = write_run(tmp_path, vision=False, update=SHORT / 4, stored="float32")
    assert verify(folder, folder / "merged", dtype="bfloat16").verdict == "inconclusive"


def test_adapter_without_effect(reading: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(reading / "adapter", tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(VlmflowError, match=r"show 0\.00 times the adapter's effect, which is 0 of"):
        verify_logits(reading / "base", adapter, reading / "base", said(reading), "cpu", "float32")


def test_weights_that_are_nan(reading: Path, tmp_path: Path) -> None:
    merged = changed_copy(
        reading, tmp_path / "m", lambda name, tensor, _: tensor * torch.nan if "q_proj" in name else tensor
    )
    with pytest.raises(VlmflowError, match="differ by nan"):
        verify(reading, merged)


def test_missing_configuration(seeing: Path, seen: list[Inputs], tmp_path: Path) -> None:
    """The folder is used as a person would, offline and without the base."""
    merged = shutil.copytree(seeing / "merged", tmp_path / "m")
    (merged / "config.json").unlink()
    with pytest.raises(VlmflowError, match=f"{merged}: does not load offline with transformers: "):
        verify(seeing, merged, seen)


def test_missing_processor(seeing: Path, tmp_path: Path) -> None:
    merged = shutil.copytree(seeing / "merged", tmp_path / "m")
    (merged / "preprocessor_config.json").unlink()
    with pytest.raises(VlmflowError, match=f"{merged}: rows for the logits: .*no attribute image_processor"):
        inputs_of([ROW], template_arguments(merged, "qwen3_vl", "default", {}), seeing, 64)


def test_missing_tensor(reading: Path, tmp_path: Path) -> None:
    """Transformers would fill the gap with random numbers."""
    merged = shutil.copytree(reading / "merged", tmp_path / "m")
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.gate_proj.weight"
    path = merged / index["weight_map"][name]
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path, {"format": "pt"})
    with pytest.raises(VlmflowError, match=f"no fitting weights for {name}"):
        verify(reading, merged)


class Refusing(BaseHTTPRequestHandler):
    """A hub that counts its requests."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing on the console."""


def test_the_hub_gets_no_request(reading: Path) -> None:
    """The model loads offline; the hub gets no request, without any switch in the environment."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    code = f"""
from pathlib import Path
from vlmflow.merging.verify_logits import verify_logits
import torch
folder, inputs = Path({str(reading)!r}), [dict(input_ids=torch.arange(200, 244)[None])]
verify_logits(folder / "base", folder / "adapter", folder / "merged", inputs, "cpu", "float32")
"""
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "PYTHONPATH": str(ROOT / "scripts"),
        "HF_HOME": str(reading / "home"),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
    server.shutdown()
    assert Refusing.asked == 0


def trained_itself(folder: Path, update: float = 0.1) -> Path:
    """What a training of all weights of the text model releases, with the logits as plain transformers gives them."""
    released = folder / "released"
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    torch.manual_seed(3)
    randomise(model, update)
    model.save_pretrained(released)
    names = sorted(name for name, _ in model.named_parameters())
    (released / "trained.json").write_text(json.dumps({"tensors": names}))
    rows = {}
    for number, ids in enumerate((torch.arange(200, 244), torch.arange(220, 280))):
        with torch.inference_mode():
            logits = model(input_ids=ids[None], logits_to_keep=POSITIONS).logits[0]
        rows |= {f"row.{number}.input_ids": ids[None], f"row.{number}.logits": logits.clone()}
    save_file(rows, released / "logits.safetensors")
    return released


@pytest.fixture
def itself(reading: Path, tmp_path: Path) -> Path:
    shutil.copytree(reading / "base", tmp_path / "base")
    released = trained_itself(tmp_path)
    merge_weights(tmp_path / "base", released, tmp_path / "merged", file_names(tmp_path / "base"), 2)
    return tmp_path


def stored_proof(folder: Path, merged: str = "merged") -> LogitProof:
    return verify_stored_logits(folder / "base", folder / "released", folder / merged, "cpu", "float32")


def test_trained_weights_answer_as_in_the_trainer(itself: Path) -> None:
    """The base is stored in bfloat16: rounding changes the logits, and is allowed for."""
    proof = stored_proof(itself)
    assert (proof.verdict, proof.rows, proof.positions) == ("agree", 2, 2 * POSITIONS)
    assert 0 < proof.deviation < proof.allowed_deviation < proof.effect


def test_weights_that_answer_otherwise_than_in_the_trainer_are_found(itself: Path) -> None:
    """The base itself, and logits of other weights."""
    with pytest.raises(VlmflowError, match="differ by"):
        stored_proof(itself, "base")
    stored = load_file(itself / "released" / "logits.safetensors")
    stored["row.1.logits"] = stored["row.1.logits"].flip(0).contiguous()
    save_file(stored, itself / "released" / "logits.safetensors")
    with pytest.raises(VlmflowError, match="differ by"):
        stored_proof(itself)
