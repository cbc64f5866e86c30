"""The files of a model, the names of its tensors, and models that are refused, with file, key and value."""

import json
import os
from pathlib import Path

import pytest

from stages.fetch_model import main as fetch_model
from stages.fetch_model_files import main as fetch_model_files
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch import model_files
from vlmflow.fetch.chat_templates import require_chat_template
from vlmflow.fetch.model_files import INDEX, SINGLE, is_taken, list_files, refuse_code, sort_names
from vlmflow.fetch.model_weights import refuse_other_tensors, tensor_names
from vlmflow.fetch.placed import naming_files, read_small_files

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of three files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / SHARD).write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": SHARD}}))
    return folder


def check(folder: Path) -> list[str]:
    """Do the same checks as the stage before it reads the files."""
    names = list_files(folder, "models.m.source").names
    refuse_code(folder, names)
    return names


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "1_Pooling/config.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
        *("tokenizer.model", "qwen.tiktoken", "additional_chat_templates/tools.jinja"),
        *("LICENSE", "LICENSE.md", "NOTICE", "two words.txt"),
    ],
)
def test_a_models_files_are_taken(name: str) -> None:
    assert is_taken(name)


@pytest.mark.parametrize(
    "name",
    [
        *("modeling_x.py", "x.pyc", "x.so", "x.sh", "x.pth", "pytorch_model.bin", "optimizer.pt", "model.pkl", "x.npz"),
        *("README.md", "args.json", "x.JSON", "x.json.py", "json", "a{b}.json", "a\nb.json", "a\udcffb.json"),
    ],
)
def test_nothing_else_is(name: str) -> None:
    assert not is_taken(name)
    [left_out] = sort_names([name]).left_out
    left_out.encode()
    assert left_out.isprintable()


def test_paths_that_are_not_files_of_the_folder_are_named_and_not_opened(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "outside.pem").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("..")
    (folder / "nowhere").symlink_to("gone")
    os.mkfifo(folder / "pipe")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.json").write_text("no JSON")
    (folder / os.fsdecode(b"\xff.json")).write_text("no JSON")
    files = list_files(folder, "m")
    assert files.names == ["config.json", SHARD, INDEX]
    assert files.left_out == ["nowhere", "outside.pem", "pipe", "up", "\\udcff.json"]


@pytest.mark.parametrize("name", ["merges.txt", "model.safetensors", "sub/vocab.json"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """Its bytes would be merged, and published."""
    (tmp_path / "secret").write_text("secret")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(VlmflowError, match=rf"{name}: leads outside the model's folder, to .*secret\n.*cp --deref"):
        check(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_file_that_git_has_not_fetched_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(VlmflowError, match=rf"{name}: is a pointer of Git LFS, not the file\n.*git lfs pull"):
        check(folder)


def test_the_blobs_of_another_repository_are_outside(tmp_path: Path, folder: Path) -> None:
    snapshot = tmp_path / "hub" / "models--o--m" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    other = tmp_path / "hub" / "models--o--other" / "blobs"
    other.mkdir(parents=True)
    (other / "1").write_text("{}")
    (snapshot / "vocab.json").symlink_to(other / "1")
    with pytest.raises(VlmflowError, match="leads outside the model's folder"):
        check(snapshot)


@pytest.mark.parametrize(
    ("target", "is_refused"), [(SHARD, False), ("gone", True), ("../model", True), ("merges.txt", True)]
)
def test_a_link_within_the_folder_leads_to_a_file(folder: Path, target: str, is_refused: bool) -> None:
    (folder / "merges.txt").symlink_to(target)
    if is_refused:
        with pytest.raises(VlmflowError, match=r"merges\.txt: is not a file"):
            check(folder)
    else:
        assert "merges.txt" in check(folder)


CODE = {"AutoModel": "modeling_x.Model"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            (name, json.dumps({"auto_map": CODE}), r"auto_map = .*modeling_x\.Model.*names Python code")
            for name in ("config.json", "tokenizer_config.json", "processor_config.json", "generation_config.json")
        ),
        ("preprocessor_config.json", '{"image_processor": {"auto_map": {"A": "x.X"}}}', r'auto_map = {"A": "x\.X"}'),
        ("sub/config.json", '[{"a": [{"auto_map": ["x.X", null]}]}]', r'auto_map = \["x\.X", null\]'),
        ("config.json", '{"auto\\u005fmap": {"A": "x.X"}}', "auto_map = "),
        ("config.json", '{"auto_map": {"A": "x.X"}, "auto_map": {}}', "auto_map = "),
        ("config.json", '{"custom_pipelines": {"p": {"impl": "x.X"}}}', "custom_pipelines = .*names Python code"),
        ("config.json", '{"transformers_weights": "a.bin"}', 'transformers_weights = "a.bin": names other weights'),
        ("config.json", '{"num_labels": 1000000000}', "num_labels = 1000000000: is for classifiers"),
        ("config.json", '{"attn_implementation": "owner/kernel"}', "attn_implementation = .*names a kernel"),
        ("config.json", '{"text_config": {"_attn_implementation": {"": "o/k"}}}', "_attn_implementation = .*a kernel"),
        ("adapter_config.json", "{}", "the model's folder contains an adapter"),
        ("config.json", "{", "is not readable JSON"),
        ("config.json", "[" * 200_000, "is not readable JSON"),
        ("config.json", "1" * 100_000, "is not readable JSON"),
    ],
)
def test_more_than_data_is_refused(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    with pytest.raises(VlmflowError, match=rf"{name}: {message}") as error:
        check(folder)
    assert len(str(error.value).splitlines()) == 2


def test_a_long_value_is_cut(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"auto_map": {"A": "x" * 10_000}}))
    with pytest.raises(VlmflowError, match="x…: names Python") as error:
        check(folder)
    assert len(str(error.value)) < 1_000


def test_names_without_end_are_cut(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["A\x1b" * 10_000] * 10}))
    with pytest.raises(VlmflowError, match=r"the model is a A\\x1bA") as caught:
        refuse_code(folder, ["config.json"])
    assert len(str(caught.value)) < 1_000
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w" * 10_000: "x" * 10_000}}))
    with pytest.raises(VlmflowError, match="which is missing") as caught:
        refuse_code(folder, [INDEX])
    assert len(str(caught.value)) < 1_000


def test_empty_names_of_code_are_allowed(folder: Path) -> None:
    """A vocabulary may have such a token; null and {} name nothing."""
    (folder / "vocab.json").write_text('{"auto_map": 7, "a": 0}')
    (folder / "config.json").write_text('{"auto_map": null, "text_config": {"auto_map": {}}}')
    assert len(check(folder)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight_map": {"w": "../" + SHARD}}, r'w = "\.\./.*a shard must be in the model\'s own folder'),
        ({"weight_map": {"w": "/etc/passwd"}}, r'w = "/etc/passwd": a shard must be'),
        ({"weight_map": {"w": "sub/" + SHARD}}, ".*a shard must be"),
        ({"weight_map": {"w": "..\\" + SHARD}}, ".*a shard must be"),
        ({"weight_map": {"w": ["x"]}}, r'w = \["x"\]: a shard must be'),
        ({"weight_map": {"w\n": "x.safetensors"}}, r'w\\n = "x\.safetensors", which is missing'),
        ({"weight_map": {"w": "pytorch_model.bin"}}, 'w = "pytorch_model.bin", which is missing'),
        ({"weight_map": {"w": "config.json"}}, 'w = "config.json": a shard must be a safetensors file'),
        ({"weight_map": []}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_shards_are_in_the_folder(folder: Path, content: object, message: str) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(VlmflowError, match=rf"index\.json: (weight_map: )?{message}"):
        check(folder)


def test_pickles_next_to_a_decoy_in_safetensors_are_refused(folder: Path) -> None:
    """Without another index transformers reads that of the pickles, which may have any name."""
    for index in folder.glob("*.index.json"):
        index.unlink()
    (folder / "weights.txt").write_bytes(b"pickle")
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "weights.txt"}}')
    with pytest.raises(VlmflowError, match=r"pytorch_model\.bin\.index\.json: the weights are pickles"):
        check(folder)


def test_a_huge_json_file_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_JSON_BYTES", 10)
    (folder / "config.json").write_text(" " * 9 + "{}")
    with pytest.raises(VlmflowError, match=r"config\.json: 11 bytes of JSON; the limit is 10"):
        check(folder)


def test_only_pickled_weights_are_refused_by_name(folder: Path) -> None:
    (folder / SHARD).rename(folder / "pytorch_model.bin")
    with pytest.raises(VlmflowError, match=r"has no safetensors weights, but pytorch_model\.bin"):
        check(folder)


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_quantised_model_is_refused_before_a_gpu_is_asked_for(folder: Path, place: str) -> None:
    quantisation = {"quantization_config": {"quant_method": "fp8"}}
    config = quantisation if place == "top" else {"text_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(VlmflowError, match=r"config\.json: the base is quantised \(fp8\)"):
        check(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.json", "{}"),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
        ("processor_config.json", '{"chat_template": "{{ messages }}"}'),
    ],
)
def test_a_model_without_a_chat_template_is_refused_before_it_is_trained(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(VlmflowError, match="the model has no chat template"):
        require_chat_template(tmp_path)
    (tmp_path / name).write_text(content)
    require_chat_template(tmp_path)


def test_a_model_can_be_estimated_before_its_weights_are_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    fetch_model_files(files=tmp_path / "files", source=str(source), store=tmp_path / "store")
    assert [file.name for file in read_small_files(tmp_path / "files").iterdir()] == ["config.json"]
    with pytest.raises(VlmflowError, match="has no safetensors weights"):
        fetch_model(model=tmp_path / "model", source=str(source), store=tmp_path / "store")


def weights(*names: str) -> bytes:
    """Give a safetensors file with tensors of one byte."""
    entries = {name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(len(names))


def sharded(folder: Path) -> list[str]:
    """Write two shards and their index; returns their names."""
    shards = {"one.safetensors": ["b"], "two.safetensors": ["a", "c"]}
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for shard, names in shards.items():
        (folder / shard).write_bytes(weights(*names))
    return [INDEX, *shards]


def test_they_come_from_the_index_or_from_the_only_file(tmp_path: Path) -> None:
    assert tensor_names(tmp_path, ["config.json", SINGLE]) is None, "it is not here"
    (tmp_path / SINGLE).write_bytes(weights("b", "a"))
    assert tensor_names(tmp_path, [SINGLE]) == ["a", "b"]
    assert tensor_names(tmp_path, sharded(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "content", [b"", b"weights", (1 << 60).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
)
def test_a_header_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(VlmflowError, match=r"model\.safetensors: its header cannot be read: "):
        tensor_names(tmp_path, [SINGLE])


def test_an_index_that_names_other_tensors_than_the_files_have_is_refused(tmp_path: Path) -> None:
    """Lengths and tensors were checked by the index alone."""
    names = sharded(tmp_path)
    refuse_other_tensors(tmp_path, names)
    (tmp_path / "two.safetensors").write_bytes(weights("a"))
    with pytest.raises(VlmflowError, match=r"index\.json: tensor c is listed for two"):
        refuse_other_tensors(tmp_path, names)
    (tmp_path / "two.safetensors").write_bytes(weights("a", "c", "d\x1b"))
    with pytest.raises(VlmflowError, match=r"tensor d\\x1b is not listed, but is in two"):
        refuse_other_tensors(tmp_path, names)


def test_the_only_file_of_weights_belongs_to_what_is_watched() -> None:
    """Its tensors are compared before it is fetched, so others must be compared again."""
    assert naming_files(["config.json", SINGLE]) == ["config.json", SINGLE]
    assert naming_files(["config.json", INDEX, "one.safetensors"]) == ["config.json", INDEX]
