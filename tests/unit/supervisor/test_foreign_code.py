"""A checkpoint of DeepSpeed is loaded only if it calls nothing but what DeepSpeed's own ones call."""

import os
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmflow.core.errors import VlmflowError
from vlmflow.supervisor.run_folder import SAFE, ForeignCodeError, refuse_foreign_code

STATES = "global_step20/mp_rank_00_model_states.pt"


class Harmful:
    """Runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pickle-ran",)


class Hidden:
    """Gets a function without its name: so it would get any."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint with one file as DeepSpeed makes it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint-20"
    (folder / "global_step20").mkdir(parents=True)
    (folder / "latest").write_text("global_step20\n")
    torch.save({"module": OrderedDict(a=torch.zeros(9)), "ds_version": "0.19.8"}, folder / STATES)
    return folder


def write(file: Path, content: bytes) -> None:
    """Write a file of torch.save with a pickle of our own."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")


def called(name: str) -> bytes:
    """Return a pickle that calls a name with the text `x`."""
    return b"\x80\x02c" + b"\n".join(name.encode().rsplit(b".", 1)) + b"\nX\x01\x00\x00\x00x\x85R."


def made(name: str) -> bytes:
    """Return a pickle that makes an object of a class, and gives it the value a = 1."""
    return b"\x80\x02c" + b"\n".join(name.encode().rsplit(b".", 1)) + b"\n)\x81}X\x01\x00\x00\x00aK\x01sb."


def test_what_deepspeed_saves_is_loaded(checkpoint: Path) -> None:
    refuse_foreign_code(checkpoint)
    for name in SAFE:
        write(checkpoint / "global_step20" / f"{name}.called", called(name))
        write(checkpoint / "global_step20" / f"{name}.made", made(name))
    refuse_foreign_code(checkpoint)


@pytest.mark.parametrize("name", [*(f"{name}.__init__" for name in SAFE), *(f"x.{name}" for name in SAFE)])
def test_a_name_like_a_safe_one_is_refused(checkpoint: Path, name: str) -> None:
    for content in (called(name), made(name)):
        write(checkpoint / STATES, content)
        with pytest.raises(ForeignCodeError, match=f"would call {re.escape(name)} when it is loaded"):
            refuse_foreign_code(checkpoint)


@pytest.mark.parametrize("harm", [Harmful(), Hidden(), print, pickle.loads, torch.hub.load])
def test_what_calls_anything_else_is_refused_by_name(checkpoint: Path, harm: Any) -> None:
    for place in (STATES, "global_step20/of_another_kind"):
        torch.save({"module": {}, "x": harm}, checkpoint / place)
        with pytest.raises(ForeignCodeError, match="when it is loaded") as caught:
            refuse_foreign_code(checkpoint)
        assert place in caught.value.cause
        (checkpoint / place).unlink()
    assert not Path("pickle-ran").exists()
    if isinstance(harm, Harmful):
        assert "would call posix.system when" in caught.value.cause


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_no_other_protocol_hides_a_name(checkpoint: Path, protocol: int) -> None:
    torch.save({"x": Harmful()}, checkpoint / STATES, pickle_protocol=protocol)
    with pytest.raises(ForeignCodeError):
        refuse_foreign_code(checkpoint)
    (checkpoint / STATES).write_bytes(pickle.dumps(Harmful(), protocol))  # torch.load also takes what is no archive
    with pytest.raises(ForeignCodeError, match="has another form than DeepSpeed's files"):
        refuse_foreign_code(checkpoint)
    assert not Path("pickle-ran").exists()


@pytest.mark.parametrize("name", ["", "..", "/srv/global_step20", "global_step20/..", "global_step[2]0", "other"])
def test_the_folder_has_deepspeeds_own_name(checkpoint: Path, name: str) -> None:
    (checkpoint / "latest").write_text(name)
    with pytest.raises(ForeignCodeError, match=r"latest: .* is no name of DeepSpeed's"):
        refuse_foreign_code(checkpoint)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_what_is_no_file_of_torch_is_refused_with_the_next_step(checkpoint: Path, content: bytes) -> None:
    (checkpoint / STATES).write_bytes(content)
    with pytest.raises(VlmflowError, match="has another form than DeepSpeed's files") as caught:
        refuse_foreign_code(checkpoint)
    assert f"rm -r {checkpoint}" in caught.value.next_step


def test_what_is_no_regular_file_is_refused_and_not_waited_for(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "global_step20" / "a.pt")
    with pytest.raises(ForeignCodeError, match=r"a\.pt: .*it is no regular file"):
        refuse_foreign_code(checkpoint)


def test_tensors_bytes_are_not_read(checkpoint: Path) -> None:
    torch.save({"module": torch.zeros(50_000_000, dtype=torch.uint8)}, checkpoint / STATES)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    refuse_foreign_code(checkpoint)
    assert read() - before < 10_000_000
