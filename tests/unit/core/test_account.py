import re
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import FOLDER_MARK, write_json


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
