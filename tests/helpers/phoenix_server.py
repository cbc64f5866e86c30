"""A real Phoenix on loopback, which shows traces to people. It is fetched into uv's cache when it is first started."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vlmflow.serving.server import free_port, running
from workflow_runs import ROOT

RUN = [str(ROOT / ".venv/bin/uv"), "tool", "run", "--from", "arize-phoenix==20.26.1", "phoenix"]

FOUND = """query ($project: ID!, $condition: String!) { node(id: $project) { ... on Project {
  spans(first: 1000, filterCondition: $condition) { edges { node { name } } } } } }"""

START = 600.0
"""Seconds in which it must answer: it imports for some, and makes its tables."""


class Phoenix:
    """A server. url: its address, also for traces."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str) -> Any:
        """Return the answer of its REST API to a GET."""
        with urllib.request.urlopen(f"{self.url}/v1/{path}", timeout=60) as answer:  # noqa: S310
            return json.load(answer)

    def spans(self, project: str, count: int) -> list[dict[str, Any]]:
        """Return the spans of a project, once it has so many: Phoenix answers before it has stored them."""
        give_up = time.monotonic() + 60
        while True:
            known = {one["name"] for one in self.ask("projects")["data"]}
            found = self.ask(f"projects/{project}/spans?limit=1000")["data"] if project in known else []
            if len(found) >= count:
                return list(found)
            assert time.monotonic() < give_up, f"{len(found)} of {count} spans"
            time.sleep(0.5)

    def filtered(self, project: str, condition: str) -> list[str]:
        """Return the sorted names of a project's spans that its filter finds, as people write it into the page."""
        (number,) = [one["id"] for one in self.ask("projects")["data"] if one["name"] == project]
        question = {"query": FOUND, "variables": {"project": number, "condition": condition}}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/graphql", json.dumps(question).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            found = json.load(answer)
        return sorted(edge["node"]["name"] for edge in found["data"]["node"]["spans"]["edges"])


@contextmanager
def phoenix_server(folder: Path) -> Iterator[Phoenix]:
    """Run a server whose database is in a folder, until the block ends.

    If it cannot be fetched the test is skipped; under CI it fails.
    """
    if subprocess.run([*RUN, "--help"], capture_output=True, check=False).returncode:
        reason = "arize-phoenix is neither in uv's cache nor can it be fetched"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    port = free_port()
    own = {"PHOENIX_WORKING_DIR": str(folder), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port)}
    own |= {"PHOENIX_GRPC_PORT": str(free_port()), "PHOENIX_TELEMETRY_ENABLED": "false"}
    place = ("Phoenix", port, folder, folder / "server.log", os.environ | own, START)
    with running([*RUN, "serve"], *place, at_our_death=signal.SIGTERM):
        yield Phoenix(f"http://127.0.0.1:{port}")
