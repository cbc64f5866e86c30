"""The programs of stages in a shell full of what their libraries and launchers read: they compute the same bits."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed.run import get_args_parser

from tiny_trainings import IMAGE_MAX_TOKENS, Tiny, losses_of
from vlmflow.core.child_programs import KEPT
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.answer_losses import Pass, Work
from vlmflow.evaluation.measure import Measurement, ScoredModel, measure
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.rows.chat import Turn
from vlmflow.serving.client import Client
from vlmflow.serving.server import serve_with_transformers
from vlmflow.supervisor.train import train
from vlmflow.swift import encoded_rows
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment, run_module
from vlmflow.swift.own_template import _load_rows, _rows
from warm_programs import fresh

LIBRARIES = (
    *("accelerate", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub", "modelscope", "peft", "qwen_vl_utils"),
    *("swift", "torch", "transformers", "trl"),
)

OF_LIBRARIES = re.compile(rb"""["']([A-Z][A-Z0-9_]{2,})["']""")
"""A text that may be a variable's name."""

OF_MS_SWIFT = re.compile(rb"""["']([a-z][a-z0-9_]{2,})["']""")
"""The same where ms-swift reads variables by names in lower case (utils/utils.py, get_env_args)."""


def variables() -> set[str]:
    """Return the names of all variables that the libraries may read: every such text in a file that reads some."""
    names = set()
    for library in LIBRARIES:
        for file in Path(str(find_spec(library).origin)).parent.rglob("*.py"):
            text = file.read_bytes()
            if b"environ" in text or b"getenv" in text or b"get_env" in text:
                names.update(OF_LIBRARIES.findall(text))
            if b"get_env_args" in text:
                names.update(map(bytes.upper, OF_MS_SWIFT.findall(text)))
    launcher = {f"PET_{action.dest.upper()}" for action in get_args_parser()._actions}
    return launcher | {name.decode() for name in names}


WHOLE = {"source": "s", "images": [], "attempts": [1], "scores": []}
"""What a row of a tiny training lacks."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model and rows with pictures."""
    tiny = Tiny.write(tmp_path_factory.mktemp("tiny"), vision=True)
    for split in ("train", "val"):
        file = tiny.folder / f"{split}.jsonl"
        rows = [WHOLE | json.loads(line) | {"id": str(n)} for n, line in enumerate(file.read_text().splitlines())]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny


def lengths(tiny: Tiny, folder: Path) -> Any:
    words = as_words(template_arguments(tiny.folder / "base", "qwen3_vl", "default", {}))
    env = environment(tiny.folder / "pictures", IMAGE_MAX_TOKENS, folder / "cache", 1)
    (folder / "given.json").write_text(json.dumps({"tensors": None, "files": [], "form": {}}))
    words = [
        encoded_rows.CHECK,
        *(str(place) for place in (tiny.folder / "train.jsonl", folder / "given.json", folder / "lengths.json")),
        *words,
    ]
    run_module(encoded_rows.__name__, words, folder, env, folder / "log", "lengths")
    return json.loads((folder / "lengths.json").read_text())["lengths"]


def losses(tiny: Tiny, folder: Path) -> Any:
    pictures = tiny.folder / "pictures"
    how = Measurement("qwen3_vl", {}, "default", pictures, IMAGE_MAX_TOKENS, 512, "cpu", "float32", 1, 1)
    turns = [Turn("human", "<image>\nred"), Turn("gpt", "one two")]
    work = [Work("k", {"all": Pass(turns, ["red.png"])})]
    return msgspec.to_builtins(measure(ScoredModel("it", tiny.folder / "base", "d"), work, how, folder / "store"))


def trained(tiny: Tiny, folder: Path, nodes: int = 1) -> Any:
    training = tiny.training(processes=1, max_steps=2, checkpoint_steps=2, evaluation_steps=2)
    training, runs = replace(training, nodes=nodes), folder / "r" / "full"
    made = train(training, runs, 2, "train_model r")
    return losses_of(training, runs), sha256_of(made.last.folder / "adapter_model.safetensors")


def trained_on_two_nodes(tiny: Tiny, folder: Path) -> Any:
    """The first node starts the other, and each a launcher with its trainer."""
    return trained(tiny, folder, 2)


def served(tiny: Tiny, folder: Path) -> Any:
    with (
        serve_with_transformers(tiny.folder / "base", folder / "scratch", folder / "log", threads=1) as server,
        Client(server.url, server.model, server.key) as client,
    ):
        return client.answer([{"role": "user", "content": "red"}], 8)


QUICK = [lengths, losses, trained]
ALL = [lengths, losses, trained_on_two_nodes, served]
"""The kinds of programs."""


@contextmanager
def a_full_shell(names: set[str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setenv(name, "4")
        yield


def computed(kinds: list[Callable[[Tiny, Path], Any]], tiny: Tiny, folder: Path) -> dict[str, Any]:
    """Return what each kind of program computes, by its name."""
    found = {}
    for kind in kinds:
        (folder / kind.__name__).mkdir(parents=True)
        found[kind.__name__] = kind(tiny, folder / kind.__name__)
    return found


def test_a_changed_file_of_the_same_name_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for said in ("one", "two"):
        file.write_text(json.dumps({"conversations": [{"from": "gpt", "value": said}]}) + "\n")
        (row,) = _load_rows("json", data_files=str(file), cache_dir=str(tmp_path / "cache"))
        assert json.loads(row["conversations"])[0]["value"] == said


def test_columns_that_would_mean_something_to_ms_swift_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(WHOLE | {"system": "x", "messages": 3, "conversations": []}) + "\n")
    assert [*_rows(str(file))] == [{"conversations": "[]", "images": []}]


@pytest.mark.slow
@pytest.mark.parametrize("itself", [False, True])
def test_no_variable_of_the_shell_changes_what_is_computed(tiny: Tiny, tmp_path: Path, itself: bool) -> None:
    """itself: each program starts by itself, so it also imports its libraries in that shell's environment."""
    known = {"SPATIAL_MERGE_SIZE", "MAX_RATIO", "MAX_PIXELS", "CELOSS_PARALLEL_SIZE", "RAY_SWIFT_ARGS", "RANK"}
    read = variables()
    assert known | {"PET_NNODES", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} <= read
    names = {name for name in read if not any(fnmatchcase(name, pattern) for pattern in KEPT)}
    kinds = ALL if itself else QUICK
    expected = computed(kinds, tiny, tmp_path / "plain")
    with a_full_shell(names), fresh() if itself else a_full_shell(set()):
        found = computed(kinds, tiny, tmp_path / "full")
    assert found == expected
    assert len(names) > 2_000
