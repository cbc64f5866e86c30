"""Accounts that stages write, and files that changed after one recorded them: by size, mtime, inode, digest."""

import os
import re
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from made_accounts import some_checks
from vlmflow.core.account import LEVEL, RECORDS, compare, read_account, refuse_changed, refuse_other_rows, write_account
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import FOLDER_MARK, sha256_of, write_json
from vlmflow.merging.proof import read_proof, verified_files, write_proof


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Three files with their digests, in `tmp_path / "files"`, changed long ago; records are kept."""
    monkeypatch.setenv(RECORDS, str(tmp_path / "records"))
    monkeypatch.setenv(LEVEL, "quick")
    (tmp_path / "files" / "deep").mkdir(parents=True)
    names = ["a", "b", "deep/c"]
    for name in names:
        (tmp_path / "files" / name).write_text(f"the bytes of {name[-1]}")
        os.utime(tmp_path / "files" / name, (1e9, 1e9))
    return {name: sha256_of(tmp_path / "files" / name) for name in names}


def look(folder: Path, files: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the missing and the changed files."""
    return compare("files", folder / "files", files, "kind/name")


def read_files(capsys: pytest.CaptureFixture[str]) -> str:
    """Return how many files were read since the last call, from the log ("" for none)."""
    said = capsys.readouterr().err
    return said.split(": ")[1].split(" ")[0] if said else ""


def swap(file: Path, content: str) -> None:
    """Replace a file by another one of the same size and times."""
    before = file.stat()
    other = file.with_name("other")
    other.write_text(content)
    assert other.stat().st_size == before.st_size
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


def forge(file: Path, content: str) -> None:
    """Write as many other bytes into a file, and restore its times."""
    before = file.stat()
    with file.open("r+") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (after.st_size, after.st_mtime_ns, after.st_ino)


def test_files_are_read_only_once(tmp_path: Path, files: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert look(tmp_path, files) == ([], [])
    assert read_files(capsys) == "3"
    assert look(tmp_path, files) == ([], [])
    assert read_files(capsys) == ""
    os.utime(tmp_path / "files" / "b", (1e9 + 1, 1e9 + 1))
    assert look(tmp_path, files) == ([], []), "touched, with the bytes that it had"
    assert read_files(capsys) == "1"
    assert look(tmp_path, {name: files[name] for name in ("a", "b")}) == ([], [])
    assert look(tmp_path, files) == ([], []), "a look at some of the files forgets none of the others"
    assert read_files(capsys) == ""


def test_every_kind_of_change_is_seen(tmp_path: Path, files: dict) -> None:
    assert look(tmp_path, files) == ([], [])
    (tmp_path / "files" / "a").write_text("the bytes of A and more")
    swap(tmp_path / "files" / "b", "the bytes of B")
    (tmp_path / "files" / "deep" / "c").unlink()
    assert look(tmp_path, files) == (["deep/c"], ["a", "b"])
    with pytest.raises(VlmflowError) as refusal:
        refuse_changed("pictures", tmp_path / "files", files, "kind/name", "do this")
    assert refusal.value.cause == (
        f"{tmp_path}/files: 2 of 3 pictures have changed since they were checked: a, b; "
        "1 of 3 pictures are missing: deep/c"
    )
    assert refusal.value.next_step == "do this"


@pytest.mark.parametrize(
    "place", ["a folder", "a pipe", "a link to nothing", "a link to itself", "a file where its folder was"]
)
def test_paths_that_are_no_longer_files_count_as_missing(tmp_path: Path, files: dict, place: str) -> None:
    """A pipe is not waited for."""
    file = tmp_path / "files" / "deep" / "c"
    file.unlink()
    match place:
        case "a folder":
            file.mkdir()
        case "a pipe":
            os.mkfifo(file)
        case "a link to nothing":
            file.symlink_to("nothing")
        case "a link to itself":
            file.symlink_to(file.name)
        case _:
            file.parent.rmdir()
            file.parent.write_text("")
    assert look(tmp_path, files) == (["deep/c"], [])


def test_a_file_that_cannot_be_read_is_neither_gone_nor_changed(tmp_path: Path, files: dict) -> None:
    """The next read may succeed; here the kernel refuses the first page of a process's memory."""
    (tmp_path / "files" / "b").unlink()
    (tmp_path / "files" / "b").symlink_to("/proc/self/mem")
    with pytest.raises(PassingError, match=rf"^{tmp_path}/files/b: Input/output error\n"):
        look(tmp_path, files)


def test_forged_times_deceive_a_quick_check_but_not_a_full_one(
    tmp_path: Path, files: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known limit: other bytes with the same size, mtime and inode."""
    assert look(tmp_path, files) == ([], [])
    forge(tmp_path / "files" / "b", "the bytes of B")
    assert look(tmp_path, files) == ([], [])
    monkeypatch.setenv(LEVEL, "full")
    assert look(tmp_path, files) == ([], ["b"])


def test_another_machine_reads_everything_once(
    tmp_path: Path, files: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy has other inodes; the record of the original does no harm."""
    assert look(tmp_path, files) == ([], [])
    (tmp_path / "files").rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "files")
    read_files(capsys)
    assert look(tmp_path, files) == ([], [])
    assert read_files(capsys) == "3"
    assert look(tmp_path, files) == ([], [])
    assert read_files(capsys) == ""
    monkeypatch.delenv(RECORDS)
    assert look(tmp_path, files) == ([], [])
    assert read_files(capsys) == "3", "without records every file is read"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": [1, 2, 3, "digest"]}', None])
def test_without_a_valid_record_files_are_read(tmp_path: Path, files: dict, damage: bytes | None) -> None:
    record = tmp_path / "records" / "kind" / "name.json"
    record.parent.mkdir(parents=True)
    if damage is None:
        record.mkdir()  # and it cannot be written either
    else:
        record.write_bytes(damage)
    swap(tmp_path / "files" / "b", "the bytes of B")
    assert look(tmp_path, files) == ([], ["b"])


def test_a_record_with_another_digest_is_ignored(tmp_path: Path, files: dict) -> None:
    """The digest of the earlier stage decides; a record of another digest is ignored."""
    assert look(tmp_path, files) == ([], [])
    assert look(tmp_path, files | {"a": "0" * 64}) == ([], ["a"])
    assert look(tmp_path, files) == ([], [])


def test_a_file_that_changed_a_moment_ago_is_read_again(tmp_path: Path, files: dict) -> None:
    """Its next change could have the same timestamp."""
    file = tmp_path / "files" / "b"
    os.utime(file, (time.time() + 3600,) * 2)  # as if no time had passed, or the disk's clock were ahead
    assert look(tmp_path, files) == ([], [])
    forge(file, "the bytes of B")
    assert look(tmp_path, files) == ([], ["b"])


def test_changes_during_a_proof_are_not_recorded_as_proven(
    tmp_path: Path, files: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is from before the change, its stat from after it."""
    folder = tmp_path / "files"
    verified = verified_files(folder, folder.name)
    (folder / "b").write_text("the bytes of B")
    os.utime(folder / "b", (1e9 + 1, 1e9 + 1))
    write_proof(folder, some_checks(), verified, tmp_path)
    with pytest.raises(VlmflowError, match="1 of 3 model files have changed since they were checked: b"):
        read_proof(folder)


def test_rows_that_changed_are_refused(tmp_path: Path) -> None:
    """They are read completely each time; size, times and inode do not matter."""
    rows, account = tmp_path / "train.jsonl", tmp_path / "train.account.json"
    rows.write_text('{"id": 1}\n')
    write_json(account, {"digests": {rows.name: sha256_of(rows), "pictures": "no file"}})
    refuse_other_rows(account)
    forge(rows, '{"id": 2}\n')
    for files in (None, [rows]):
        with pytest.raises(VlmflowError, match=f"^{rows}: {account} records other digests for these rows"):
            refuse_other_rows(account, files)
    rows.unlink()
    with pytest.raises(VlmflowError, match=f"^{rows}: .* records other digests for these rows"):
        refuse_other_rows(account)


def test_an_account_without_digests_is_refused_by_its_name(tmp_path: Path) -> None:
    write_json(tmp_path / "stats.json", {"dataset": "fire"})
    with pytest.raises(VlmflowError, match=r"stats\.json: digests is missing"):
        refuse_other_rows(tmp_path / "stats.json")
    write_json(tmp_path / "summary.json", {"digests": {"train.jsonl": "0"}})
    with pytest.raises(VlmflowError, match=r"summary\.json: digests\[\.\.\.\]: Expected `object`, got `str`"):
        refuse_other_rows(tmp_path / "summary.json", [], "rows")


class Rows(msgspec.Struct):
    kept: int
    by_reason: dict[str, int] = {}


class Account(msgspec.Struct):
    name: str
    train: Rows
    share: float = 0.0
    files: list[Rows] = []
    folder: Path | None = None
    test: Rows | UnsetType = UNSET


Table = dict[str, str]


def test_an_account_is_read_as_it_was_written(tmp_path: Path) -> None:
    account = Account("ü", Rows(3, {"b": 1, "a": 2}), 1e-05, [Rows(1)], Path("/a/b"))
    write_account(tmp_path / "account.json", account)
    assert read_account(tmp_path / "account.json", Account) == account


def test_an_account_has_the_bytes_of_the_same_keys_as_json(tmp_path: Path) -> None:
    """Keys are in the order of the fields, and those without a value are left out."""
    write_account(tmp_path / "account.json", Account("ü", Rows(3, {"b": 1, "a": 2}), 1e-05, [Rows(1)], Path("/a/b")))
    plain = {
        "name": "ü",
        "train": {"kept": 3, "by_reason": {"b": 1, "a": 2}},
        "share": 1e-05,
        "files": [{"kept": 1, "by_reason": {}}],
        "folder": "/a/b",
    }
    write_json(tmp_path / "plain.json", plain)
    assert (tmp_path / "account.json").read_bytes() == (tmp_path / "plain.json").read_bytes()


def test_a_table_of_files_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    """Its keys are data: none is known beforehand, and none is left out."""
    account: Table = {"val/b.arrow": "2", "train/a.arrow": "1"}
    write_account(tmp_path / "digests.json", account)
    assert (tmp_path / "digests.json").read_text() == '{\n "val/b.arrow": "2",\n "train/a.arrow": "1"\n}\n'
    assert read_account(tmp_path / "digests.json", Table) == account
    write_json(tmp_path / "digests.json", {"a": None})
    with pytest.raises(VlmflowError, match=r"digests\.json: \[\.\.\.\]: Expected `str`, got `null`"):
        read_account(tmp_path / "digests.json", Table)


def test_keys_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    write_json(tmp_path / "account.json", {"name": "n", "train": {"kept": 1, "later": 2}, "later": None})
    assert read_account(tmp_path / "account.json", Account) == Account("n", Rows(1))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"train": {"kept": 1}}, "account.json: name is missing"),
        ({"name": "n", "train": {}}, "account.json: train.kept is missing"),
        ({"name": "n", "train": {"kept": "1"}}, "account.json: train.kept: Expected `int`, got `str`"),
        (
            {"name": "n", "train": {"kept": 1}, "files": [{"kept": 1}, {"kept": None}]},
            "account.json: files[1].kept: Expected `int`, got `null`",
        ),
        ({"name": "n", "train": {"kept": 1}, "folder": 1}, "account.json: folder: Expected `Path`, got `int`"),
        ([], "account.json: Expected `object`, got `array`"),
    ],
)
def test_an_account_of_another_shape_is_refused_with_its_field(tmp_path: Path, content: object, fault: str) -> None:
    write_json(tmp_path / "account.json", content)
    with pytest.raises(VlmflowError, match=re.escape(fault)) as error:
        read_account(tmp_path / "account.json", Account)
    assert error.value.cause.endswith(fault)
    assert f"remove {tmp_path / 'account.json'} and run the same command again" in error.value.next_step


@pytest.mark.parametrize("content", ["{}", "{", None])
def test_of_a_folder_that_a_rule_made_all_is_to_be_removed(tmp_path: Path, content: str | None) -> None:
    """Snakemake makes a folder again only if the folder itself is missing."""
    (tmp_path / FOLDER_MARK).touch()
    if content is not None:
        (tmp_path / "account.json").write_text(content)
    with pytest.raises(VlmflowError) as error:
        read_account(tmp_path / "account.json", Account)
    assert f"remove {tmp_path} and run the same command again" in error.value.next_step


def test_an_account_that_is_missing_or_not_json_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"account\.json"):
        read_account(tmp_path / "account.json", Account)
    (tmp_path / "account.json").write_text("{")
    with pytest.raises(VlmflowError, match=r"account\.json"):
        read_account(tmp_path / "account.json", Account)
