"""All checks of `make doctor`, in the order in which a run needs what they check.

Print a table of what a cluster has and lacks for the configuration's runs; exit code 0 if it is ready.

Needs a kubeconfig (KUBECONFIG), or runs in the controller pod. It makes about four short Jobs and removes them.
"""

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes

from vlmflow import CHECKOUT
from vlmflow.config.model import Config, check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import Api, Object, Refused, connect
from vlmflow.remote.cluster.copying import named, selector
from vlmflow.remote.cluster.group_kinds import KINDS, check_served
from vlmflow.remote.cluster.pods import NAMES, pod_templates
from vlmflow.remote.findings import Finding, report
from vlmflow.remote.kubernetes import inside, needs, objects
from vlmflow.remote.kubernetes.needs import jobs_of, need_of
from vlmflow.remote.kubernetes.probe import Answer, Probe
from vlmflow.remote.planned_jobs import hub_sources

PATIENCE_ELSEWHERE = 60.0
"""Seconds to wait for a second node: there may be none."""

ACCOUNTS = "system:serviceaccount:{namespace}:{name}"


class Doctor:
    """Checks one namespace of a cluster for what some runs of a configuration need.

    client: a function that returns a new client of the API; a client may impersonate another account.
    locks: the folder of the lock files. patience: seconds to wait for each probe's pod.
    """

    def __init__(
        self,
        client: Callable[[], kubernetes.client.ApiClient],
        namespace: str,
        settings: Config,
        needs_of_runs: list[needs.Need],
        locks: Path,
        patience: float,
    ) -> None:
        self._client = client
        self._api = Api(client(), namespace)
        self._needs = needs_of_runs
        self._groups = settings.cluster.multi_node
        self._hub = hub_sources(settings, [need.run for need in needs_of_runs])
        self._locks = locks
        self._patience = patience
        self._templates: dict[str, Object] = {}
        self._nodes: list[Object] = []

    def look(self) -> Iterator[Finding]:
        """Yield each check as soon as it is made: first the objects, then what pods see."""
        try:
            version = self._api.call("GET", "/version")
        except Refused as refused:
            yield _not_seen("API server", refused)
            return
        yield objects.check_version(version)
        present = list(self._try("namespace", self._namespace))
        yield from present
        if any(check.state == "fail" for check in present):
            return
        yield from self._try("several nodes", self._several_nodes)
        executor = (*objects.EXECUTOR, *objects.GROUPS[self._groups], *objects.STORAGE_KEYS)
        yield from self._try("rights", lambda: objects.check_rights(self._api, "yours", executor))
        yield from self._try("rights of accounts", self._rights_of_service_accounts)
        for claim in inside.FOLDERS:
            yield from self._try(f"claim {claim}", partial(self._claim, claim))
        yield from self._try("pod templates", self._read_templates)
        yield from self._try("hub token", self._secret)
        yield from self._try("controller", self._controller)
        if all(name in self._templates for name in NAMES):
            yield from self._try("GPUs", self._look_at_nodes)
            yield from self._try("quota", self._quota)
            yield from self._look_inside()

    def _try(self, what: str, look: Callable[[], list[Finding]]) -> Iterator[Finding]:
        try:
            yield from look()
        except Refused as refused:
            yield _not_seen(what, refused)

    def _namespace(self) -> list[Finding]:
        try:
            namespace = self._api.call("GET", f"/api/v1/namespaces/{self._api.namespace}")
        except Refused as refused:
            if refused.status != 404:
                raise
            namespace = None
        return [objects.check_namespace(namespace, self._api.namespace)]

    def _several_nodes(self) -> list[Finding]:
        kind = KINDS[self._groups]
        try:
            check_served(self._api, kind)
        except VlmflowError as error:
            return [Finding("several nodes", "fail", error.cause, error.next_step)]
        return [Finding("several nodes", "ok", f"the cluster serves {kind.name}")] if kind.plurals else []

    def _rights_of_service_accounts(self) -> list[Finding]:
        checks = []
        if self._api.get("serviceaccounts", named("vlmflow-controller")):
            executor = (*objects.EXECUTOR, *objects.GROUPS[self._groups])
            checks += objects.check_rights(self._as("vlmflow-controller"), "controller", executor)
        return [*checks, objects.check_job_service_account(self._as("vlmflow-job"))]

    def _as(self, name: str) -> Api:
        client = self._client()
        user = ACCOUNTS.format(namespace=self._api.namespace, name=named(name))
        client.set_default_header("Impersonate-User", user)
        return Api(client, self._api.namespace)

    def _claim(self, name: str) -> list[Finding]:
        return [objects.check_claim(self._api.get("persistentvolumeclaims", named(name)), named(name))]

    def _read_templates(self) -> list[Finding]:
        found = pod_templates(lambda kind: self._api.list(kind, selector()))
        check = objects.check_templates(found)
        if check.state != "fail":
            self._templates = {template["metadata"]["name"]: template for template in found.templates}
        return [check]

    def _secret(self) -> list[Finding]:
        return [objects.check_secret(self._api.get("secrets", named("hf-token")), self._hub)]

    def _controller(self) -> list[Finding]:
        deployment = self._api.get("apps/v1/deployments", named("controller"))
        return [*(self._claim(objects.STATE_CLAIM) if deployment else []), objects.check_controller(deployment)]

    def _look_at_nodes(self) -> list[Finding]:
        self._nodes = self._api.call("GET", "/api/v1/nodes")["items"]
        return needs.check_nodes(self._nodes, self._templates, self._needs)

    def _quota(self) -> list[Finding]:
        resource = needs.gpu_resource(self._templates["gpu"])
        return [needs.check_quota(self._api.list("resourcequotas"), resource, self._needs)]

    def _look_inside(self) -> Iterator[Finding]:
        # Without the right to list nodes, try the run's own number: its pod starts, or shows why it cannot.
        wanted = max((need.gpus for need in self._needs), default=0)
        gpus = needs.most_gpus(self._nodes, needs.gpu_resource(self._templates["gpu"])) if self._nodes else wanted
        images = {"default": self._locks / "data.lock", "train": self._locks / "train.lock"}
        probes: list[Probe[Any]] = []
        left = f".doctor-{uuid.uuid4()}"
        try:
            for name, lock in images.items():
                probes.append(inside.look_inside(self._api, self._templates[name], lock, left))
            for probe, lock in zip(tuple(probes), images.values(), strict=True):
                answer = probe.answer(self._patience)
                yield from inside.check_inside(answer, lock)
                if answer.said and answer.said.folders:
                    yield from self._look_from_elsewhere(left, answer.node, probes)
            if answer.said:  # the training image runs
                training = inside.train_together(self._api, self._templates, self._needs, gpus)
                probes.append(training)
                yield inside.check_training(training.answer(self._patience))
        finally:
            for probe in probes:
                probe.remove()

    def _look_from_elsewhere(self, left: str, first: str, probes: list[Probe[Any]]) -> Iterator[Finding]:
        """Check from a second node what a probe on the node `first` left on the volumes, and remove it."""
        template = self._templates["default"]
        others = [node for node in self._nodes if node["metadata"]["name"] != first]
        seen_from = None
        if not self._nodes or any(needs.barred(node, template["template"]["spec"]) is None for node in others):
            probes.append(inside.look_from_elsewhere(self._api, template, left, first))
            seen_from = probes[-1].answer(min(self._patience, PATIENCE_ELSEWHERE))
        yield inside.check_from_elsewhere(seen_from or Answer("", fault="no other node takes our pods"), first)
        if seen_from is None or not seen_from.said:
            probes.append(inside.look_from_elsewhere(self._api, template, left, first=""))
            probes[-1].answer(self._patience)


def _not_seen(what: str, refused: Refused) -> Finding:
    if refused.status == 403:
        return Finding(
            what, "warn", f"you have no right to read it: {refused}", "ask an administrator to run make doctor"
        )
    return Finding(what, "fail", str(refused), "check that KUBECONFIG names the right cluster and the API server is up")


LAYERS = [CHECKOUT / "config.yaml", CHECKOUT / "profiles/kubernetes/stores.yaml"]


def main(
    namespace: str,
    files: list[Path],
    runs: list[str],
    as_json_text: bool,
    patience: float,
    max_threads: int | None = None,
) -> int:
    """Print the findings; returns the exit code."""
    settings = check_config(read_layers([*LAYERS, *files]), [*LAYERS, *files])
    unknown = [run for run in runs if run not in settings.runs]
    if unknown:
        raise VlmflowError(f"--run: unknown run {unknown[0]}", f"use one of {', '.join(settings.runs)}")
    wanted = [
        need_of(settings, run, jobs_of(CHECKOUT / "Snakefile", [*LAYERS[1:], *files], f"merged/{run}", max_threads))
        for run in runs or settings.runs
    ]
    doctor = Doctor(lambda: connect(_say, patience=5), namespace, settings, wanted, CHECKOUT / "envs", patience)
    return report(doctor.look(), as_json_text)


def _say(words: str) -> None:
    print(words, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespace", default=os.environ.get("VLMFLOW_NAMESPACE", "vlmflow"))
    parser.add_argument(
        "--configfile", type=Path, nargs="+", default=[], metavar="FILE", help="settings over config.yaml"
    )
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="check these runs alone")
    parser.add_argument(
        "--max-threads", type=int, metavar="N", help="as in make cluster-run: no rule requests more cores"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument(
        "--patience", type=float, default=180, metavar="SECONDS", help="wait this long for a probe's pod"
    )
    given = parser.parse_args()
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        sys.exit(main(given.namespace, given.configfile, given.run, given.json, given.patience, given.max_threads))
    except VlmflowError as error:
        sys.exit(str(error))
