"""A run's weights in use: behind a real server, and in the terminal beside the base."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from vlmflow.core.errors import VlmflowError
from vlmflow.merging.logits import load, logits_of
from vlmflow.rows.chat import messages_of
from vlmflow.serving.asked import asked_by_person, asked_in_val, opened
from vlmflow.serving.client import Client, picture_part
from vlmflow.serving.finished_run import finished_run, link_served
from vlmflow.serving.loaded import LoadedModel
from vlmflow.tools.serve import main as serve
from vlmflow.tools.try_run import main as try_run
from workflow_runs import RUN, copy_folder, vlmflow

TOKENS = 24


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Return a picture that is larger than the run's limit."""
    drawn = Image.effect_noise((700, 500), 90).convert("RGB")
    drawn.save(tmp_path / "drawn.png")
    return tmp_path / "drawn.png"


@contextmanager
def served(folder: Path, *words: str) -> Iterator[tuple[str, str, str, subprocess.Popen[str]]]:
    """Start `vlmflow serve`; yield the server's address, its model's name, its key, and the command's process."""
    command = vlmflow("serve", RUN, "--directory", folder, *words)
    given = {**os.environ, "HF_TOKEN": "secret", "TMPDIR": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=given)
    try:
        assert process.stdout
        first, *others = (process.stdout.readline() for _ in range(3))
        name, key = (line.split(": ")[1].strip() for line in others)
        yield first.split()[3], name, key, process
    finally:
        process.kill()
        process.wait()


def wait_until_ended(pid: int) -> None:
    give_up = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up
        time.sleep(0.1)


def test_the_served_weights_answer_as_in_this_process_and_end_with_the_caller(
    demo_run: Path, picture: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    for name in ("merged", "models", "checkpoints"):
        (folder / name).symlink_to(demo_run / name)
    asked = asked_by_person("How many balls?", picture)
    with served(folder) as (url, model, key, process):
        (server,) = psutil.Process(process.pid).children()
        assert "secret" not in server.environ().values()
        assert len(key) == 32
        assert not [word for each in (server, psutil.Process(process.pid)) for word in each.cmdline() if key in word]
        messages = messages_of(asked.turns, [picture_part(picture)])
        with Client(url, model, key) as client:
            answer = client.answer(messages, TOKENS)
        with (
            Client(url, "another", key) as client,
            pytest.raises(VlmflowError, match=r"HTTP 400: .*requested 'another'"),
        ):
            client.answer(messages, TOKENS)
        with (
            Client(url, model) as client,
            pytest.raises(VlmflowError, match=r"HTTP 401: .*does not have this server's key"),
        ):
            client.answer(messages, TOKENS)
        of_disk = messages_of(asked.turns, [{"type": "image_url", "image_url": {"url": str(picture)}}])
        with Client(url, model, key) as client, pytest.raises(VlmflowError, match=r"HTTP 400: .*in the request itself"):
            client.answer(of_disk, TOKENS)
        listed = httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False)
        assert [one["id"] for one in listed.json()["data"]] == [model]
        assert key not in (folder / "logs" / "serve" / f"{RUN}.log").read_text()
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until_ended(server.pid)
    link_served(demo_run / "merged" / RUN, tmp_path / "served", 64)
    here = LoadedModel(tmp_path / "served", "cpu", "float32").answer(asked.turns, [opened(picture)], TOKENS)
    assert replace(here, text=here.text.strip()) == answer, "transformers' server strips answers"


def test_base_and_tuned_scale_a_picture_to_the_runs_limit(demo_run: Path, picture: Path, tmp_path: Path) -> None:
    run = finished_run(demo_run, RUN)
    for what, model in (("base", run.base()), ("tuned", run.merged)):
        link_served(model, tmp_path / what, 16)
        processor = AutoProcessor.from_pretrained(tmp_path / what)
        grid = processor.image_processor(opened(picture), return_tensors="pt")["image_grid_thw"][0]
        assert 8 <= int(grid.prod()) // 4 <= 16, what


def test_an_adapter_beside_its_base_is_the_tuned_model(demo_run: Path, tmp_path: Path) -> None:
    run = finished_run(demo_run, RUN)
    link_served(run.base(), tmp_path / "base", 64)
    link_served(run.base(), tmp_path / "both", 64, run.adapter())
    asked = {"input_ids": torch.arange(200, 232)[None]}
    base, both, tuned = (
        logits_of(load(folder, "cpu", "float32"), asked, 32)
        for folder in (tmp_path / "base", tmp_path / "both", run.merged)
    )
    effect = (tuned - base).abs().max()
    assert (tuned - both).abs().max() < effect / 20
    assert effect > 0.1


def columns(text: str) -> tuple[str, str]:
    """Return the letters of the two columns of a table of 100 characters."""
    body = [line.ljust(100) for line in text.splitlines()]
    return tuple(re.sub(r"\s", "", "".join(line[part] for line in body)) for part in (slice(0, 50), slice(50, 100)))  # type: ignore[return-value]


def test_try_shows_both_models_before_and_after_feedback(
    demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    try_run(RUN, [], demo_run, most_tokens=TOKENS)
    shown = capsys.readouterr().out
    asked = asked_in_val(demo_run / "fitted" / RUN, demo_run / "stores" / "pictures")
    assert shown.startswith("val row train-")
    tables = shown.split("─" * 90)[1:]
    assert len(tables) == 2
    assert " ".join(f"feedback: {asked.feedback}".split()) in " ".join(shown.split())
    model = _tuned(demo_run, tmp_path)
    first = model.answer(asked.turns, [opened(asked.pictures[0])], TOKENS)
    begin = re.sub(r"\s", "", first.text)[:40]
    assert begin in columns(tables[0])[1]
    assert begin not in columns(tables[0])[0]


def _tuned(demo_run: Path, tmp_path: Path) -> LoadedModel:
    link_served(demo_run / "merged" / RUN, tmp_path / "served", 64)
    return LoadedModel(tmp_path / "served", "cpu", "float32")


def test_a_text_run_is_tried_and_has_no_adapter(
    text_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    try_run("text", [], text_run, ask="Say 7.", feedback="Say 8.", most_tokens=4)
    shown = capsys.readouterr().out
    assert "question: Say 7." in shown
    assert shown.index("─" * 90) < shown.index("feedback: Say 8.") < shown.rindex("─" * 90)
    with pytest.raises(VlmflowError, match="tuner full trains the weights themselves, so there is no adapter"):
        serve("text", text_run, 0, 1, "adapter")


def test_what_cannot_be_tried_or_served_is_refused(
    demo_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VlmflowError, match=f"run 'other' are not there; finished here: {RUN}"):
        try_run("other", [], demo_run)
    with pytest.raises(VlmflowError, match=r"there is no question about it"):
        try_run(RUN, [], demo_run, picture=Path("cat.jpg"))
    with pytest.raises(VlmflowError, match=r"cat\.jpg: cannot be read as a picture"):
        try_run(RUN, [], demo_run, picture=tmp_path / "cat.jpg", ask="What?")
    folder = copy_folder(demo_run / "merged", tmp_path / "merged").parent
    provenance = folder / "merged" / RUN / "provenance.json"
    provenance.write_text(provenance.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    with pytest.raises(VlmflowError, match="not run here: vllm is not installed in "):
        serve(RUN, folder, 8000, 2)
    command = capfd.readouterr().out
    assert f"vllm serve {folder}/merged/{RUN} --host 127.0.0.1 --port 8000 --tensor-parallel-size 2" in command
    assert command.startswith('VLLM_API_KEY="${VLLM_API_KEY:?choose a key}" HF_HUB_OFFLINE=1 vllm serve ')
    assert '"longest_edge": 65536' in command
