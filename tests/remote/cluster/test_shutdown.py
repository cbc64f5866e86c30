"""Ending Jobs on a cluster that is slow to remove them."""

import json
import time

import pytest

from cluster import jobs
from cluster.kubectl import Kubectl, a_namespace, client_of
from cluster.shell import wait_for
from vlmflow.remote.kubernetes import namespace as namespace_calls
from vlmflow.remote.kubernetes.namespace import Namespace, end_all

NAMESPACE = "test-clean-end"
FINALIZER = "tests.vlmflow/kept"


def test_jobs_of_which_nothing_runs_are_not_waited_for(any_cluster: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that nobody removes simulates a controller manager that is far behind."""
    monkeypatch.setattr(namespace_calls, "IDLE_SECONDS", 2.0)
    job = jobs.job("kept", ["true"], "unknown.invalid/image")
    job["metadata"] |= {"finalizers": [FINALIZER], "labels": {"test": "kept"}}
    job["spec"]["template"]["metadata"] = {"labels": {"test": "kept"}}
    said: list[str] = []
    with any_cluster.having(a_namespace(NAMESPACE)):
        any_cluster.apply(job, NAMESPACE)
        pod = jobs.pod_of(any_cluster, "kept", NAMESPACE)
        namespace = Namespace(client_of(any_cluster.kubeconfig), NAMESPACE)
        begun = time.monotonic()
        assert end_all(namespace, "test=kept", "Ctrl-C.", said.append) == {pod["metadata"]["name"]}
        assert 2 <= time.monotonic() - begun < 120
        assert "Ending 1 Job" in said[0]
        assert said[1] == "The cluster has not removed these Jobs yet, but no pod runs: kept."
        wait_for("its pod goes", lambda: not namespace.pods("test=kept"))
        (left,) = namespace.jobs("test=kept")
        assert "deletionTimestamp" in left["metadata"]
        free = json.dumps({"metadata": {"finalizers": None}})
        any_cluster.kubectl("--namespace", NAMESPACE, "patch", "job", "kept", "--type=merge", f"--patch={free}")
        wait_for("it goes", lambda: not namespace.jobs("test=kept"))
