"""JupyterLab on the cluster, with the demo's results on its volume; test_tensorboard.py tests its objects."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.cluster import Cluster
from cluster.component import Component, running
from workflow_runs import RUN

pytestmark = pytest.mark.slow  # its image takes two minutes


@pytest.fixture(scope="module")
def jupyter(cluster: Cluster, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Component]:
    """JupyterLab, with the demo's targets in its volume."""

    def fill(outputs: Path) -> None:
        for name in ("data", "fitted", "lengths", "checkpoints", "verified"):
            shutil.copytree(demo / name, outputs / "targets" / name)

    with running(cluster, "jupyter", "jupyter", tmp_path_factory.mktemp("k8s"), fill) as component:
        yield component


def test_only_its_token_opens_it(jupyter: Component) -> None:
    token = jupyter.in_pod("cat /tmp/token").strip()
    assert len(token) == 64
    assert token not in jupyter.cluster.kubectl(f"--namespace={jupyter.namespace}", "logs", jupyter.pod)
    with jupyter.forwarded(8888) as address:
        assert httpx.get(f"{address}/api/contents", timeout=60).status_code == 403
        assert httpx.post(f"{address}/api/kernels", timeout=60).status_code == 403
        known = {"headers": {"Authorization": f"token {token}"}, "timeout": 60}
        listed = httpx.get(f"{address}/api/contents", **known).raise_for_status().json()
        assert [one["name"] for one in listed["content"]] == ["look.ipynb"]


def test_its_notebook_shows_the_results_on_the_volume(jupyter: Component) -> None:
    said = jupyter.in_pod(
        f"cd /tmp && VLMFLOW_RUN={RUN} jupyter nbconvert --to notebook --execute --stdout --log-level=ERROR "
        "notebooks/look.ipynb",
    )
    cells = json.loads(said[said.index("{\n") :])["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert f"run {RUN} in /outputs/targets" in text
    assert "the gate is open" in text
    assert "not evaluated" in text
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 3


def test_its_pod_can_write_nothing_and_has_no_token(jupyter: Component) -> None:
    assert "Read-only file system" in jupyter.in_pod("touch /outputs/targets/new")
    assert "Read-only file system" in jupyter.in_pod("touch /cache/new")
    assert "Read-only file system" in jupyter.in_pod("touch /opt/vlmflow/notebooks/new")
    assert "No such file" in jupyter.in_pod("ls /var/run/secrets/kubernetes.io")
    assert jupyter.in_pod("id -u").strip() == "1000"
