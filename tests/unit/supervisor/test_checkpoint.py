"""Checkpoints: which are whole, and those of DeepSpeed, loaded only if they call nothing but what its own ones call."""

import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from checkpoints import checkpoint
from vlmflow.config.run_settings import LoraSettings
from vlmflow.config.strategies import DDP
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import records_digest, sha256_of
from vlmflow.in_trainer.messages import DIGESTS, SavedDigests
from vlmflow.supervisor.report import refuse_other_adapter, release
from vlmflow.supervisor.run_folder import (
    SAFE,
    Checkpoint,
    ForeignCodeError,
    TrainerState,
    newest_whole_checkpoint,
    read_checkpoint,
    refuse_foreign_code,
)

FILES = ["adapter_model.safetensors", "adapter_config.json", "trainer_state.json", "optimizer.pt", "scheduler.pt"]


def test_the_newest_complete_checkpoint_is_used(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        checkpoint(tmp_path, step)
    newest = newest_whole_checkpoint(tmp_path, 2, DDP)
    assert (newest.step, newest.target) == (20, 30)
    assert newest.best == tmp_path / "checkpoint-20"
    assert newest_whole_checkpoint(tmp_path / "none", 2, DDP) is None


@pytest.mark.parametrize("name", [*FILES, "rng_state_1.pth"])
@pytest.mark.parametrize("damage", ["cut", "missing", "empty"])
def test_an_unreadable_checkpoint_is_skipped(tmp_path: Path, name: str, damage: str) -> None:
    """After a kill or a full disk, training resumes from the previous one; the broken one is removed."""
    checkpoint(tmp_path, 10)
    broken = checkpoint(tmp_path, 20)
    content = (broken / name).read_bytes()
    if damage == "missing":
        (broken / name).unlink()
    else:
        (broken / name).write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    if (name, damage) == ("adapter_config.json", "cut"):
        assert content[:1] == b"{"
    assert read_checkpoint(broken, 2, DDP) is None
    assert newest_whole_checkpoint(tmp_path, 2, DDP).step == 10
    assert not broken.exists()


def test_a_state_of_another_form_is_refused_and_its_checkpoint_stays(tmp_path: Path) -> None:
    other = checkpoint(tmp_path, 20)
    (other / "trainer_state.json").write_text('{"global_step": "20"}')
    with pytest.raises(VlmflowError, match=r"checkpoint-20/trainer_state\.json: .*global_step"):
        newest_whole_checkpoint(tmp_path, 2, DDP)
    assert other.exists()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt"])
def test_a_saved_checkpoint_without_a_kind_of_file_is_moved_aside(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another form, as from FSDP or save_only_model: formerly days of work were deleted as "not whole"."""
    checkpoint(tmp_path / "checkpoints", 10)
    other = checkpoint(tmp_path / "checkpoints", 20)
    (other / name).rename(other / "pytorch_model.distcp")
    assert newest_whole_checkpoint(tmp_path / "checkpoints", 2, DDP).step == 10
    (kept,) = (tmp_path / "aside").iterdir()
    assert (kept / "pytorch_model.distcp").stat().st_size
    assert f"lacks {name}" in caplog.text
    assert str(kept) in caplog.text


def test_a_checkpoint_that_a_kill_cut_off_is_removed(tmp_path: Path) -> None:
    """The trainer's state is written last; without it the checkpoint was never complete."""
    cut = checkpoint(tmp_path / "checkpoints", 20)
    for name in ("trainer_state.json", "scheduler.pt"):
        (cut / name).unlink()
    assert newest_whole_checkpoint(tmp_path / "checkpoints", 2, DDP) is None
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoints"]


@pytest.mark.parametrize(
    ("losses", "early_stop_after", "ended", "early"),
    [
        ([3.0, 2.0, 2.5, 2.0], 2, True, True),
        ([3.0, 2.0, 2.5, 1.9], 2, False, False),
        ([3.0, 2.0, float("nan"), float("nan")], 2, True, True),
        ([3.0, 2.0, 2.5, 2.6], None, False, False),
        ([3.0, 2.0, 2.5, 2.6], 3, False, False),
        ([3.0, 2.9, 2.8, 2.7, 2.6], 3, True, False),
        ([3.0, 2.9, 2.8, 2.7, None], 3, False, False),
    ],
)
def test_a_training_ends_early_or_at_its_evaluated_last_step(
    losses: list[float | None], early_stop_after: int | None, ended: bool, early: bool
) -> None:
    """The losses are in the checkpoint, where a resumed training reads them."""
    history = [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses, 1) if loss is not None]
    state = TrainerState(len(losses), 5, log_history=[{"step": 1, "loss": 4.0}, *history])
    found = Checkpoint(Path("checkpoint"), state)
    assert (found.ended(early_stop_after), found.ended_early(early_stop_after)) == (ended, early)


def test_a_flipped_bit_in_an_optimizer_state_is_noticed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 10)
    content = bytearray((folder / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "optimizer.pt").write_bytes(content)
    assert read_checkpoint(folder, 2, DDP) is None


def test_weights_that_changed_since_they_were_saved_are_no_checkpoint(tmp_path: Path) -> None:
    """Blocks of zeros, as after a crash of the machine: safetensors has no checksum, so they read as weights."""
    folder = checkpoint(tmp_path, 10)
    files = {name: sha256_of(folder / name) for name in FILES[:2]}
    write_account(folder / DIGESTS, SavedDigests(files))
    assert read_checkpoint(folder, 2, DDP) is not None
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    half = len(content) // 2
    weights.write_bytes(content[:half] + bytes(len(content) - half))
    assert read_checkpoint(folder, 2, DDP) is None
    weights.write_bytes(content)
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert read_checkpoint(folder, 2, DDP) is None
    (folder / DIGESTS).write_text("[")
    assert read_checkpoint(folder, 2, DDP) is None


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state_1.pth", "trainer_state.json"])
def test_a_file_of_another_checkpoint_is_noticed(name: str, tmp_path: Path) -> None:
    """A cut rsync, a restored backup and a stale cache leave whole files, which load as well."""
    old, new = checkpoint(tmp_path / "old", 10), checkpoint(tmp_path, 20)
    states = ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"]
    for number, folder in enumerate((old, new)):
        for state in states:
            torch.save({"state": torch.full((4,), number)}, folder / state)
        write_account(
            folder / DIGESTS,
            SavedDigests(
                {file: sha256_of(folder / file) for file in FILES[:2]},
                {state: records_digest(folder / state) for state in states},
            ),
        )
    assert read_checkpoint(new, 2, DDP) is not None
    (new / name).write_bytes((old / name).read_bytes())
    assert read_checkpoint(new, 2, DDP) is None


@pytest.mark.parametrize("key", ["r", "lora_alpha", "use_rslora", "use_dora"])
def test_an_adapter_of_other_settings_is_refused(tmp_path: Path, key: str) -> None:
    """The merge would scale it otherwise than the training did."""
    lora = LoraSettings(rank=8, alpha=16)
    written = {"r": 8, "lora_alpha": 16, "use_rslora": False, "use_dora": False, "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    refuse_other_adapter(tmp_path, lora)
    other = True if key.startswith("use") else 4
    (tmp_path / "adapter_config.json").write_text(json.dumps(written | {key: other}))
    with pytest.raises(VlmflowError, match=f"adapter_config.json: {key} is .*, but the run trained with"):
        refuse_other_adapter(tmp_path, lora)


def test_every_process_leaves_its_random_state(tmp_path: Path) -> None:
    assert read_checkpoint(checkpoint(tmp_path / "one", 10, processes=1), 1, DDP) is not None
    assert read_checkpoint(checkpoint(tmp_path / "two", 10), 4, DDP) is None


def test_a_published_adapter_is_readable_for_others(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 10)
    (folder / "adapter_model.safetensors").chmod(0o600)
    (tmp_path / "out").mkdir()
    release(read_checkpoint(folder, 2, DDP).folder, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES[:2])
    assert all(path.stat().st_mode & 0o044 for path in (tmp_path / "out").iterdir())


def test_any_flipped_bit_leads_to_the_older_checkpoint(tmp_path: Path) -> None:
    """Zipfile raises half a dozen kinds of errors for them."""
    older, newer = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    content = (newer / "optimizer.pt").read_bytes()
    draw = Random(1)
    for _ in range(400):
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (newer / "optimizer.pt").write_bytes(changed)
        found = read_checkpoint(newer, 2, DDP)
        assert found is None or found.step == 20  # some bits are padding
    (newer / "trainer_state.json").write_text("[" * 100_000)
    found = newest_whole_checkpoint(tmp_path, 2, DDP)
    assert found is not None
    assert found.folder == older


def test_folders_of_other_names_are_nobodys_checkpoints(tmp_path: Path) -> None:
    mine = tmp_path / "checkpoint-best-mine"
    checkpoint(tmp_path, 10).rename(mine)
    (mine / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-10.tar").write_text("")
    (tmp_path / "checkpoint-5").symlink_to(mine)
    (tmp_path / "checkpoint-²").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert newest_whole_checkpoint(tmp_path, 2, DDP) is None
    assert sorted(tmp_path.rglob("*")) == before


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
def deepspeed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_what_deepspeed_saves_is_loaded(deepspeed_checkpoint: Path) -> None:
    refuse_foreign_code(deepspeed_checkpoint)
    for name in SAFE:
        write(deepspeed_checkpoint / "global_step20" / f"{name}.called", called(name))
        write(deepspeed_checkpoint / "global_step20" / f"{name}.made", made(name))
    refuse_foreign_code(deepspeed_checkpoint)


@pytest.mark.parametrize("name", [*(f"{name}.__init__" for name in SAFE), *(f"x.{name}" for name in SAFE)])
def test_a_name_like_a_safe_one_is_refused(deepspeed_checkpoint: Path, name: str) -> None:
    for content in (called(name), made(name)):
        write(deepspeed_checkpoint / STATES, content)
        with pytest.raises(ForeignCodeError, match=f"would call {re.escape(name)} when it is loaded"):
            refuse_foreign_code(deepspeed_checkpoint)


@pytest.mark.parametrize("harm", [Harmful(), Hidden(), print, pickle.loads, torch.hub.load])
def test_what_calls_anything_else_is_refused_by_name(deepspeed_checkpoint: Path, harm: Any) -> None:
    for place in (STATES, "global_step20/of_another_kind"):
        torch.save({"module": {}, "x": harm}, deepspeed_checkpoint / place)
        with pytest.raises(ForeignCodeError, match="when it is loaded") as caught:
            refuse_foreign_code(deepspeed_checkpoint)
        assert place in caught.value.cause
        (deepspeed_checkpoint / place).unlink()
    assert not Path("pickle-ran").exists()
    if isinstance(harm, Harmful):
        assert "would call posix.system when" in caught.value.cause


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_no_other_protocol_hides_a_name(deepspeed_checkpoint: Path, protocol: int) -> None:
    torch.save({"x": Harmful()}, deepspeed_checkpoint / STATES, pickle_protocol=protocol)
    with pytest.raises(ForeignCodeError):
        refuse_foreign_code(deepspeed_checkpoint)
    (deepspeed_checkpoint / STATES).write_bytes(
        pickle.dumps(Harmful(), protocol)
    )  # torch.load also takes what is no archive
    with pytest.raises(ForeignCodeError, match="has another form than DeepSpeed's files"):
        refuse_foreign_code(deepspeed_checkpoint)
    assert not Path("pickle-ran").exists()


@pytest.mark.parametrize("name", ["", "..", "/srv/global_step20", "global_step20/..", "global_step[2]0", "other"])
def test_the_folder_has_deepspeeds_own_name(deepspeed_checkpoint: Path, name: str) -> None:
    (deepspeed_checkpoint / "latest").write_text(name)
    with pytest.raises(ForeignCodeError, match=r"latest: .* is no name of DeepSpeed's"):
        refuse_foreign_code(deepspeed_checkpoint)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_what_is_no_file_of_torch_is_refused_with_the_next_step(deepspeed_checkpoint: Path, content: bytes) -> None:
    (deepspeed_checkpoint / STATES).write_bytes(content)
    with pytest.raises(VlmflowError, match="has another form than DeepSpeed's files") as caught:
        refuse_foreign_code(deepspeed_checkpoint)
    assert f"rm -r {deepspeed_checkpoint}" in caught.value.next_step


def test_what_is_no_regular_file_is_refused_and_not_waited_for(deepspeed_checkpoint: Path) -> None:
    os.mkfifo(deepspeed_checkpoint / "global_step20" / "a.pt")
    with pytest.raises(ForeignCodeError, match=r"a\.pt: .*it is no regular file"):
        refuse_foreign_code(deepspeed_checkpoint)


def test_tensors_bytes_are_not_read(deepspeed_checkpoint: Path) -> None:
    torch.save({"module": torch.zeros(50_000_000, dtype=torch.uint8)}, deepspeed_checkpoint / STATES)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    refuse_foreign_code(deepspeed_checkpoint)
    assert read() - before < 10_000_000
