"""The command `vlmflow`: it becomes the call of Snakemake that it prints, and says what is wrong with a call."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.core import TyperGroup
from typer.main import get_command

from small_workflow import make_rows
from vlmflow import command
from vlmflow.config.tables import PINS
from vlmflow.core import child_programs
from vlmflow.core.errors import VlmflowError
from vlmflow.tools import make_pins
from workflow_runs import ROOT, vlmflow

TARGET = "data/x/stats.json"
ODD = """it's "$(touch ran)" `touch ran` ; touch ran & * ~ \\"""
"""What a shell would take for quotes, for commands and for names of files."""


def said(*words: object, folder: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Call `vlmflow` in a folder, and return its result, once its exit code is the expected one."""
    done = subprocess.run(vlmflow(*words), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with rows, their configuration, and a further one with an odd text in it."""
    block = {"kind": "prompt_completion", "modality": "text", "train": "rows.jsonl"}
    (tmp_path / "elsewhere").mkdir()
    (make_rows(tmp_path) / "mine.yaml").write_text(yaml.safe_dump({"datasets": {"x": block}}))
    (tmp_path / "also.yaml").write_text(yaml.safe_dump({"datasets": {"x": {"licence": "of also.yaml"}}}))
    return tmp_path


# --- vlmflow run


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([TARGET, "-n", "--cores", "1"], 0),
        pytest.param(["rows.jsonl", "-n"], 1, marks=pytest.mark.lengthy, id="a target that is a file of no rule"),
        pytest.param(
            [TARGET, "--also", "also.yaml", "--directory", "elsewhere", "-c1", "-n"], 0, marks=pytest.mark.lengthy
        ),
        pytest.param([TARGET, "--no-such-option", "3"], 2, marks=pytest.mark.lengthy),
        pytest.param(
            [TARGET, "-n", "--cores", "1", "--config", f"datasets={json.dumps({'x': {'licence': ODD}})}"],
            0,
            marks=pytest.mark.lengthy,
            id="a text for shells",
        ),
    ],
)
def test_run_becomes_the_call_that_it_prints(
    folder: Path, words: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan, the messages and the exit code are those of the printed call, typed into a shell."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # the order of choices in the usage
    make_rows(folder / "elsewhere")
    ours = said("run", "mine.yaml", *words, folder=folder, code=code)
    printed, _, plan = ours.stdout.partition("\n")
    assert printed.startswith("snakemake ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell, environment = ["bash", "-c", printed], os.environ | {"PATH": path}
    by_hand = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (by_hand.returncode, without_time(by_hand.stdout)) == (code, without_time(plan))
    assert without_time(by_hand.stderr) == without_time(ours.stderr)
    assert not (folder / "ran").exists()


def without_time(text: str) -> str:
    """Return it without times and the width of a terminal."""
    return " ".join(re.sub(r"\[?\w{3} \w{3} +\d+ [\d:]+ \d{4}\]?", "", text).split())


def test_a_target_that_is_also_a_file_is_a_target(folder: Path) -> None:
    """It is no configuration; a further one is named by --also, and the later one takes precedence."""
    (folder / "raw" / "x").mkdir(parents=True)
    (folder / "raw" / "x" / "rows.jsonl").write_text("no YAML: [")
    words = ["mine.yaml", "raw/x/rows.jsonl", "--also", "also.yaml", "--also=mine.yaml", "-n"]
    for name in (word for word in words if word.endswith(".yaml")):
        (folder / name.removeprefix("--also=")).touch()
    printed = said("run", *words, "--version", folder=folder).stdout.splitlines()[0]
    files = "--configfile mine.yaml also.yaml mine.yaml"
    assert printed == f"snakemake raw/x/rows.jsonl --snakefile {ROOT / 'Snakefile'} {files} -n --version"


RUN = get_command(command.app).commands["run"]  # type: ignore[attr-defined]
OPTIONS = {"-h", "--help", *(name for param in RUN.params if param.param_type_name == "option" for name in param.opts)}
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
known = st.one_of(
    texts.filter(lambda text: not text.startswith("-")).map(lambda text: [text]),
    st.one_of(texts, texts.map("-{}".format)).map(lambda text: ["--also", text]),
    texts.filter(bool).map(lambda text: [f"--also={text}"]),
)
unknown = st.one_of(texts.map("-{}".format), texts.map("--{}".format), st.sampled_from(["--", "-n", "--also-not=1"]))


@given(
    st.lists(known, max_size=4),
    st.one_of(
        st.just([]),
        st.tuples(unknown.filter(lambda word: word.partition("=")[0] not in OPTIONS), st.lists(texts)).map(
            lambda words: [words[0], *words[1]]
        ),
    ),
)
def test_words_from_the_first_unknown_option_on_go_on_unchanged(before: list[list[str]], after: list[str]) -> None:
    words = ["mine.yaml", *(word for part in before for word in part)]
    context = RUN.make_context("run", [*words, *after])
    assert context.obj == after
    files = [part[-1].removeprefix("--also=") for part in before if part[0].startswith("--also")]
    assert list(context.params["also"] or ()) == list(map(Path, files))
    assert list(context.params["targets"]) == [part[0] for part in before if not part[0].startswith("--also")]


@pytest.mark.parametrize("word", ["--configfile", "--configfiles", "--configfile=b.yaml", "--configf"])
def test_snakemakes_own_configfile_is_refused(folder: Path, word: str) -> None:
    """It would replace the configuration that the command names."""
    with pytest.raises(VlmflowError, match=r"--configfile would replace your configuration\n.*--also FILE"):
        command.snakemake_call([folder / "mine.yaml"], [], ["-n", word, "b.yaml"])


class BecomesError(Exception):
    """Instead of becoming a program."""


def test_commands_that_become_snakemake_name_their_targets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def become(program: str, call: list[str]) -> None:
        raise BecomesError(*call)

    def call_of(*words: str) -> list[str]:
        with pytest.raises(BecomesError) as raised:
            command.app(words, standalone_mode=False)
        return list(raised.value.args[1:])

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.chdir(folder)
    Path("mine.yaml").write_text("runs: {a: {}}")
    files = ["--snakefile", str(ROOT / "Snakefile"), "--configfile", "mine.yaml"]
    assert call_of("estimate", "mine.yaml", "-n", "--directory", "there") == [
        *("reports/estimate-a.html", *files, "-n", "--directory", "there")
    ]
    assert call_of("estimate", "mine.yaml", "b", "--also", "also.yaml") == [
        *("reports/estimate-b.html", *files, "also.yaml")
    ]
    assert call_of("refresh-pictures", "mine.yaml", "x", "--cores", "1") == [
        *("data/x/stats.json", "--forcerun", "resolve_images", *files, "--cores", "1")
    ]
    model = folder / "there" / "tiny-model" / "config.json"
    model.parent.mkdir(parents=True)
    model.touch()
    for words in (["--directory", "there", "-n"], ["-n", "--directory", "there"]):
        call = call_of("demo", *words)
        assert call[call.index("--directory") + 1] == "there"
        assert call[0] == "merged/qwen3vl-fire"
        assert call[-len(words) :] == words or call[-1] == "-n"
    assert not (folder / "runs").exists()


def test_the_notebook_needs_jupyterlab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def become(program: Path, words: list[str]) -> None:
        raise BecomesError(program, Path.cwd(), *words)

    for name in ("VLMFLOW_FOLDER", "VLMFLOW_RUN"):
        monkeypatch.setenv(name, "of another")
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(folder)
    with pytest.raises(VlmflowError, match=r"has no JupyterLab\n.*install .*envs/jupyter\.lock"):
        command.app(["notebook", "a"], standalone_mode=False)
    (folder / "jupyter").touch()
    with pytest.raises(BecomesError) as raised:
        command.app(["notebook", "a", "--port", "7"], standalone_mode=False)
    assert raised.value.args == (folder / "jupyter", ROOT / "notebooks", "jupyter", "lab", "--port=7", "look.ipynb")
    assert (os.environ["VLMFLOW_FOLDER"], os.environ["VLMFLOW_RUN"]) == (str(folder), "a")


def test_the_table_of_pins_is_the_one_that_the_workflow_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder; that of an installed package is not for a person to edit."""
    filled: list[Path] = []
    monkeypatch.setattr(make_pins, "main", lambda pins: filled.append(pins))
    monkeypatch.chdir(folder)
    command.app(["pins"], standalone_mode=False)
    assert filled == [PINS]
    monkeypatch.setattr(command, "CHECKOUT", command.PACKAGE / "workflow")
    with pytest.raises(VlmflowError, match=r"pins\.yaml is part of the package\n.*@COMMIT"):
        command.app(["pins"], standalone_mode=False)
    assert len(filled) == 1


# --- what people type


def test_only_the_one_run_there_is_needs_no_name(folder: Path) -> None:
    (folder / "merged").mkdir()
    (folder / "merged" / "half.part").mkdir()
    with pytest.raises(VlmflowError, match=r"merged has no run\n"):
        command.finished(folder, "")
    (folder / "merged" / "b").mkdir()
    assert command.finished(folder, "") == "b"
    assert command.finished(folder, "other") == "other"
    (folder / "merged" / "a").mkdir()
    with pytest.raises(VlmflowError, match=r"merged has 2 runs: a, b\n.*name the run"):
        command.finished(folder, "")

    files = [folder / "mine.yaml", folder / "also.yaml"]
    with pytest.raises(VlmflowError, match=r"mine\.yaml, .*also\.yaml has no run\n"):
        command.run_of(files, "")
    files[1].write_text("runs: {r: {}}")
    assert command.run_of(files, "") == "r"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["chekc", "mine.yaml"], 2, "No such command 'chekc'. Did you mean 'check'?"),
        (["cluster", "rnu"], 2, "No such command 'rnu'. Did you mean 'run'?"),
        (["run"], 2, "Missing argument 'FILE'"),
        (["run", "none.yaml", "-n"], 1, "none.yaml: No such file or directory\n  what to do: "),
        (["run", "broken.yaml"], 1, "broken.yaml, line 2, column 5: "),
        (["estimate", "mine.yaml", "--also", "broken.yaml"], 1, "broken.yaml, line 2, column 5: "),
        (["check", "broken.yaml"], 1, "broken.yaml, line 2, column 5: "),
        (["verify", "a", "--drectory", "."], 2, "No such option: --drectory"),
        (["serve", "a", "--what", "all"], 2, "Invalid value for '--what'"),
        (["rows", "a"], 2, "Missing option '--step'"),
        (["try"], 1, "merged has 2 runs: a, b\n  what to do: name the run\n"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(folder: Path, words: list[str], code: int, message: str) -> None:
    (folder / "broken.yaml").write_text("a: 1\nb: c: d\n")
    for name in "ab":
        (folder / "merged" / name).mkdir(parents=True)
    done = said(*words, folder=folder, code=code)
    assert done.stdout == ""
    assert message in done.stderr


def test_an_error_in_words_steers_no_terminal_and_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(error: Exception) -> None:
        raise error

    monkeypatch.setattr(command, "app", lambda: broken(VlmflowError("rows.jsonl\x1b: row 3: broken", "fix it")))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == "rows.jsonl�: row 3: broken\n  what to do: fix it"
    monkeypatch.setattr(command, "app", lambda: broken(OSError("odd")))
    with pytest.raises(OSError, match="odd"):
        command.main()


def test_ctrl_c_at_a_question_ends_with_130_and_deletes_nothing(folder: Path) -> None:
    left = folder / "merged" / "half.part"
    left.mkdir(parents=True)
    call = vlmflow("clean", "--directory", folder)
    process, terminal = pty.fork()
    if not process:
        os.execv(call[0], call)
    shown = b""
    while b"Delete all of it? [y/N] " not in shown:
        shown += os.read(terminal, 1000)
    while psutil.Process(process).status() != psutil.STATUS_SLEEPING:
        time.sleep(0.05)  # it does not wait for the answer yet
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    os.close(terminal)
    assert left.is_dir()


# --- what programs read


def test_json_is_all_of_the_output(folder: Path) -> None:
    Path(folder, "mine.yaml").write_text("datasets: {x: {val_share: 2}}")
    told = json.loads(said("check", folder / "mine.yaml", "--json", code=1).stdout)
    assert told["runs"] == told["notes"] == []
    assert "datasets.x.val_share" in told["errors"][0]["cause"]
    told = json.loads(said("check", folder / "also.yaml", "--json", code=1).stdout)
    assert told["errors"]


def test_status_is_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(folder / "none"))
    monkeypatch.setenv("PATH", str(folder))
    told = json.loads(said("status", "--directory", folder, "--json").stdout)
    assert told["here"] == {"jobs": [], "none": f"this machine trains nothing in {folder / 'stores' / 'runs'}"}
    assert told["kubernetes"]["jobs"] == []


# --- environments of their own


@pytest.mark.lengthy
def test_an_environment_is_installed_into_the_users_cache_once_for_each_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = folder / "envs" / "search.lock"
    lock.parent.mkdir()
    for module in (command, child_programs):
        monkeypatch.setattr(module, "CHECKOUT", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.delenv("VLMFLOW_VENV_SEARCH", raising=False)
    lock.write_text(f"no-such-package @ file://{folder}/none.whl\n")
    with pytest.raises(VlmflowError, match=r"cache/.*: -m pip install .* failed\n"):
        command.app(["env", "search"], standalone_mode=False)
    with pytest.raises(VlmflowError, match=r"is not installed\n.*vlmflow env search"):
        child_programs.python_of("search")

    lock.write_text("")
    for _ in range(2):
        command.app(["env", "search"], standalone_mode=False)
    python = child_programs.python_of("search")
    assert python.is_relative_to(folder / "cache")
    said = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(python.parents[1])
    lock.write_text("# another\n")
    with pytest.raises(VlmflowError, match="is not installed"):
        child_programs.python_of("search")


# --- the command itself


def test_an_environment_older_than_its_lock_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CHECKOUT", folder)
    monkeypatch.setattr(command, "app", lambda: None)
    for name in (".venv/train.stamp", ".venv/command.stamp", "envs/train.lock"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        os.utime(folder / name, (1, 1))
    command.main()
    assert capsys.readouterr().err == ""
    os.utime(folder / "envs" / "train.lock", (2, 2))
    command.main()
    assert capsys.readouterr().err.count("renew it: make env") == 1


def test_help_is_quick_and_imports_neither_snakemake_nor_torch() -> None:
    used = []
    for _ in range(3):
        process = subprocess.Popen(vlmflow("--help"), stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        used.append(usage.ru_utime + usage.ru_stime)
    assert min(used) <= 0.3
    for words in (["--help"], ["cluster", "--help"], ["check", "config.yaml"]):
        traced = subprocess.run(
            [sys.executable, "-X", "importtime", *vlmflow(*words)[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        loaded = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines() if "|" in line}
        assert "vlmflow" in loaded
        assert not loaded & {"snakemake", "torch", "transformers", "pyarrow"}, words


def options_of(of: Any) -> list[Any]:
    return [param for param in of.params if param.param_type_name == "option"]


def commands(of: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(of, TyperGroup):
        yield name, of
        return
    for word, each in of.commands.items():
        yield from commands(each, f"{name} {word}".strip())


def test_an_option_is_the_same_in_every_command() -> None:
    """Its name, values and words; and each command has a sentence for the list of all."""
    found: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for name, each in commands(get_command(command.app)):
        assert each.help, name
        assert each.help.splitlines()[0].endswith("."), name
        for option in options_of(each):
            kind = str(option.type_descriptor.annotation)
            found[option.opts[-1]].add((kind, option.help, option.metavar, option.multiple, tuple(option.opts)))
            assert option.help, f"{name} {option.opts}"
    assert len(found) > 20
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}
