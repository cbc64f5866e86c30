"""A server's processes: it answers, or its end is explained, and none outlives the block or the caller."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.serving.server import PortTakenError, environment, free_port, running
from workflow_runs import ROOT

STUBBORN = """
import http.server, os, signal, sys
child = os.fork()
signal.signal(signal.SIGTERM, signal.SIG_IGN if child == 0 else signal.SIG_DFL)
if child == 0:
    while True:
        signal.pause()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(child).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server with a child that ignores SIGTERM; it answers with the child's process id."""

CALLER = """
import signal, sys
from pathlib import Path
from vlmflow.serving.server import environment, free_port, running
folder, port = Path(sys.argv[1]), free_port()
words = [sys.executable, "-c", sys.argv[2], str(port)]
with running(words, "m", port, folder, folder / "log", environment(folder)) as server:
    print(server.process.pid, flush=True)
    signal.pause()
"""


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def words(code: str, port: int) -> list[str]:
    return [sys.executable, "-c", code, str(port)]


def test_the_whole_process_group_ends_with_the_block(tmp_path: Path) -> None:
    port = free_port()
    with running(words(STUBBORN, port), "m", port, tmp_path, tmp_path / "log", environment(tmp_path)) as server:
        assert server.url == f"http://127.0.0.1:{port}/v1"
        child = int(httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).text)
        assert not ended(child)
    wait_until(lambda: ended(child))
    assert ended(server.process.pid)


def test_a_killed_caller_leaves_no_server(tmp_path: Path) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, tmp_path, STUBBORN.replace("child = os.fork()", "child = 1")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        text=True,
    )
    assert caller.stdout
    server = int(caller.stdout.readline())
    assert not ended(server)
    try:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        wait_until(lambda: ended(server))
    finally:
        if not ended(server):
            os.kill(server, signal.SIGKILL)


def test_a_server_that_ends_is_explained_by_its_output(tmp_path: Path) -> None:
    port = free_port()
    code = "print('no such weights \\x1b[2J'); raise SystemExit(3)"
    with (
        pytest.raises(VlmflowError, match=r"the server of m ended with code 3 before it answered") as caught,
        running(words(code, port), "m", port, tmp_path, tmp_path / "log", environment(tmp_path)),
    ):
        pass
    assert "no such weights �[2J" in str(caught.value)


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    port = free_port()
    mark = str(tmp_path)  # its arguments are there before it does anything
    with (
        pytest.raises(PassingError, match=r"does not answer after 0:02"),
        running(
            [*words("import signal; signal.pause()", port), mark],
            *("m", port, tmp_path, tmp_path / "log", environment(tmp_path)),
            limit=2,
        ),
    ):
        pass
    assert not [each.pid for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])]


@pytest.mark.parametrize("said", ["[Errno 98] address already in use", "OSError: [Errno 98] Address already in use"])
def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path, said: str) -> None:
    """It would answer GET /health, while ours still loads."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    code = STUBBORN.replace("child = os.fork()", "child = 1")
    stranger = subprocess.Popen(words(code, port))
    try:
        wait_until(lambda: bool(psutil.Process(stranger.pid).net_connections("tcp")))
        failing = f"import sys, time; time.sleep(1); sys.exit({said!r})"
        with (
            pytest.raises(PortTakenError, match=f"port {port} is in use"),
            running(words(failing, port), "m", port, tmp_path, tmp_path / "log", environment(tmp_path)),
        ):
            pass
    finally:
        stranger.kill()
        stranger.wait()


def test_no_token_reaches_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    given = environment(tmp_path, 2)
    assert "secret" not in given.values()
    assert given["HF_HUB_OFFLINE"] == "1"
    assert given["HF_HOME"] == str(tmp_path)
    assert given["OMP_NUM_THREADS"] == "2"


def test_each_server_has_its_key_in_its_environment_alone(tmp_path: Path) -> None:
    keys = []
    for key in (None, None, "sesame"):
        port = free_port()
        code = STUBBORN.replace("child = os.fork()", "child = os.environ['VLMFLOW_ANSWER_KEY']")
        place = (port, tmp_path, tmp_path / "log", environment(tmp_path))
        with running(words(code, port), "m", *place, key=key) as server:
            assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).text == server.key
            assert psutil.Process(server.process.pid).environ()["VLLM_API_KEY"] == server.key
            assert server.key not in repr(server)
            keys.append(server.key)
    assert keys[2] == "sesame"
    assert len({*keys}) == 3
    assert min(map(len, keys[:2])) >= 32
