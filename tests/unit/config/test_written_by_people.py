"""What people write: YAML files, whose errors have file, line and column."""

from pathlib import Path

import pytest

from vlmflow.config.model import settings_of
from vlmflow.config.yaml_file import read_layers, read_yaml
from vlmflow.core.errors import VlmflowError


def written(folder: Path, text: str) -> Path:
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", '{"a": 1,\n"b": 2,\n"a": 3}'])
def test_a_duplicate_key_is_refused_with_its_lines(tmp_path: Path, text: str) -> None:
    """YAML's own loader silently uses the last one."""
    file = written(tmp_path, text)
    with pytest.raises(VlmflowError, match=f"^{file}, line 3, column 1: .*'a'.* line 1; .*; the line is: "):
        read_yaml(file)


def test_one_key_in_two_blocks_is_no_fault(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "a: {b: 1}\nc: {b: 2}\n")) == {"a": {"b": 1}, "c": {"b": 2}}


def test_aliases_that_expand_too_far_are_refused(tmp_path: Path) -> None:
    """Ten values, repeated ten times in each line: a hundred million in the eighth."""
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
    lines += [f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]" for depth in range(1, 8)]
    with pytest.raises(VlmflowError, match=r"run\.yaml, line \d+, column \d+: more than 100,000 values"):
        read_yaml(written(tmp_path, "\n".join(lines)))


def test_an_alias_of_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match="an alias is inside the value that it names"):
        read_yaml(written(tmp_path, "a: &a [*a]"))


def test_an_alias_is_what_it_names(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "a: &a [1, 2]\nb: *a\n")) == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1" * 5_000, f"'{'1' * 39}… cannot be read: Exceeds the limit"),
        (f"0x{'f' * 5_000}", f"'0x{'f' * 37}… cannot be read: Exceeds the limit"),
        ("2024-13-45", "'2024-13-45' cannot be read: month must be in"),
    ],
)
def test_a_value_that_python_cannot_read_is_named_with_its_line(tmp_path: Path, value: str, said: str) -> None:
    with pytest.raises(VlmflowError) as refusal:
        read_yaml(written(tmp_path, f"a: 1\nb: {{c: [{value}]}}\n"))
    assert refusal.value.cause.startswith(f"{tmp_path / 'run.yaml'}, line 2, column 9: {said}")
    assert refusal.value.next_step == "fix it there, or in the lines before"


def test_another_encoding_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "")
    file.write_bytes("a: ä".encode("latin-1"))
    with pytest.raises(VlmflowError) as refusal:
        read_yaml(file)
    assert refusal.value.next_step == "save the file as UTF-8"


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError) as refusal:
        read_yaml(tmp_path / "a\0b")
    assert refusal.value.next_step == "name a file that exists and can be read"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("- a\n", "not keys"),
        ("a: [1\nb: 2\n", "line 2, column 2: "),
        ("a: b: c\n", "line 1, column 5: "),
        (f"a: {'[' * 3000}{']' * 3000}", "nested too deeply"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(VlmflowError) as refusal:
        read_layers([file])
    assert refusal.value.cause.startswith(str(file))
    assert said in refusal.value.cause


def test_a_later_file_takes_precedence(tmp_path: Path) -> None:
    files = []
    for name in ("first", "second"):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(f"stores: {{runs: {name}}}\n")
    assert settings_of(files).stores.runs == "second"
