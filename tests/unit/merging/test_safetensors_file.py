"""The safetensors format, refused where a file breaks it, and the threads that read it in order."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import SafetensorsFile, read_header
from vlmflow.merging.merge import first_rows, read_rows, write_rows
from vlmflow.merging.tensors import WAITING_PER_THREAD, run_in_order

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "number": torch.tensor(7.0),
    "empty": torch.zeros(0, 4),
    "ids": torch.arange(5),
}


def written(path: Path, header: Any, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def read_tensor(file: SafetensorsFile, name: str) -> torch.Tensor:
    entry = file.tensors[name]
    return first_rows(file.path, entry, entry.rows).view(entry.shape)


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", {"format": "pt"})
    file = read_header(tmp_path / "a.safetensors")
    assert {name: entry.shape for name, entry in file.tensors.items()} == {
        "matrix": (3, 4),
        "number": (),
        "empty": (0, 4),
        "ids": (5,),
    }
    assert file.tensors["ids"].dtype == "I64"
    for name in ("matrix", "number", "empty"):
        assert torch.equal(read_tensor(file, name), TENSORS[name])


def test_rows_are_read_and_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path)
    entry = read_header(path).tensors["matrix"]
    with path.open("r+b") as file:
        rows = torch.empty((2, 4), dtype=torch.bfloat16)
        read_rows(file.fileno(), entry, 1, rows)
        assert torch.equal(rows, TENSORS["matrix"][1:])
        write_rows(file.fileno(), entry, 2, torch.zeros((1, 4), dtype=torch.bfloat16))
    changed = read_tensor(read_header(path), "matrix")
    assert torch.equal(changed[:2], TENSORS["matrix"][:2])
    assert not changed[2].any()


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    """The header promises more bytes than there are."""
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for length in (0, 5, 8, 60, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(VlmflowError, match=r"a\.safetensors: (truncated|its header cannot be read: it would end)"):
            read_header(path)


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"matrix": TENSORS["matrix"]}, path)
    file = read_header(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(VlmflowError, match="tensor matrix: its file became shorter"):
        read_tensor(file, "matrix")


F32 = {"dtype": "F32", "shape": [2]}
I64 = {"dtype": "I64", "shape": [4]}


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}', "a appears twice"),
        ({"a": {**F32, "data_offsets": [0, 8]}}, "8 bytes follow the last tensor"),
        ({"a": {**F32, "data_offsets": [8, 16]}}, "tensor a begins at byte"),
        ({"a": {**F32, "data_offsets": [0, 8]}, "b": {**F32, "data_offsets": [4, 12]}}, "tensor b begins at byte"),
        ({"a": {**F32, "data_offsets": [0, 16]}}, "tensor a has 16 bytes, which does not match F32"),
        ({"a": {**F32, "data_offsets": [16, 8]}}, "tensor a has a wrong"),
        ({"a": {**I64, "data_offsets": [0, 32]}, "b": {**I64, "data_offsets": [32, 16]}}, "tensor b has a wrong"),
        ({"a": {"dtype": "F32", "shape": [1] * 33, "data_offsets": [0, 4]}}, "tensor a has a wrong"),
        ({"a": {"dtype": "I64", "shape": [1 << 63], "data_offsets": [0, 16]}}, "tensor a has a wrong"),
        ({"a\n": {**F32, "data_offsets": [0, 8]}}, r"tensor 'a\\n' has control characters"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "tensor a has a wrong"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "data_offsets"),
        ([1, 2], "cannot be read"),
        (b"no JSON", "cannot be read"),
    ],
)
def test_broken_header_is_refused(tmp_path: Path, header: Any, fault: str) -> None:
    path = written(tmp_path / "a.safetensors", header, bytes(16))
    with pytest.raises(VlmflowError, match=r"a\.safetensors: .*" + fault):
        read_header(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 20) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(header=JSON | st.binary(max_size=40), data=st.binary(max_size=16))
def test_any_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any.safetensors", header, data)
    try:
        file = read_header(path)
    except VlmflowError:
        return
    assert sum(entry.end - entry.begin for entry in file.tensors.values()) == len(data)
    assert all(file.data_begin <= entry.begin <= entry.end <= file.size for entry in file.tensors.values())


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_in_order_and_tasks_are_created_late(threads: int) -> None:
    made = 0

    def tasks() -> Iterator[Callable[[], int]]:
        nonlocal made
        for number in range(50):
            made += 1
            yield lambda number=number: (time.sleep(0.001 * (number % 3)), number)[1]

    for done, number in enumerate(run_in_order(tasks(), threads)):
        assert number == done
        assert made <= done + 1 + threads * WAITING_PER_THREAD
    assert made == 50


def test_a_failing_task_ends_the_work() -> None:
    begun: list[int] = []

    def task(number: int) -> None:
        begun.append(number)
        time.sleep(2 * number)  # time to call off the third
        raise ValueError(f"task {number}")

    before = threading.active_count()
    with pytest.raises(ValueError, match="task 0"):
        list(run_in_order((partial(task, number) for number in range(1000)), 1))
    # The second may have begun when the first had failed; the third, handed out already, did not.
    assert begun in ([0], [0, 1])
    assert threading.active_count() == before


def test_torch_uses_one_core_per_task_and_its_own_number_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert set(run_in_order([torch.get_num_threads] * 5, 3)) == {1}
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
