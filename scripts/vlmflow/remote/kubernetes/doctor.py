"""A table of what a cluster has and lacks for the configuration's runs.

Needs a kubeconfig (KUBECONFIG), or runs in the controller pod. It makes about four short Jobs and removes them.
"""

import logging
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vlmflow.remote.cluster.api import Object, Refused, connect
from vlmflow.remote.cluster.groups import KINDS
from vlmflow.remote.cluster.kubectl import own_name
from vlmflow.remote.doctor import Finding, hub_sources, report, settings_and_runs
from vlmflow.remote.kubernetes import inside, needs, objects
from vlmflow.remote.kubernetes.inside import Answer, Probe
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.needs import Need
from vlmflow.remote.kubernetes.templates import NAMES, STATE_CLAIM, templates_of
from vlmflow.remote.library import CHECKOUT, Config

PATIENCE_ELSEWHERE = 60.0
"""Seconds to wait for a second node: there may be none."""

LAYERS = [CHECKOUT / "config.yaml", CHECKOUT / "profiles/kubernetes/stores.yaml"]
LOCKS = {"default": CHECKOUT / "envs" / "data.lock", "train": CHECKOUT / "envs" / "train.lock"}
"""The lock file of the packages in an image, by a template that has this image."""


def main(
    files: list[Path], runs: list[str], namespace: str, max_threads: int | None, patience: float, as_json: bool
) -> int:
    """Print the findings; returns the exit code.

    files: configurations over config.yaml. runs: those to check; []: all. max_threads: as for snakemake. patience:
    seconds to wait for each probe's pod.
    """
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    settings, runs = settings_and_runs([*LAYERS, *files], runs)
    wanted = [needs.need_of(settings, run, needs.jobs_of(run, [*LAYERS[1:], *files], max_threads)) for run in runs]
    return report(Doctor(namespace, settings, wanted, patience).look(), as_json)


class Doctor:
    """Checks one namespace of a cluster for what some runs of a configuration need, in the order in which they need it.

    patience: seconds to wait for each probe's pod.
    """

    def __init__(self, namespace: str, settings: Config, wanted: list[Need], patience: float) -> None:
        self._cluster = self._as(namespace)
        self._needs = wanted
        self._groups = KINDS[settings.cluster.multi_node]
        self._hub = hub_sources(settings, [need.run for need in wanted])
        self._patience = patience
        self._templates: dict[str, Object] = {}
        self._nodes: list[Object] = []

    @staticmethod
    def _as(namespace: str, account: str = "") -> Namespace:
        """Return a namespace for calls with our own rights, or with those of one of its accounts."""
        client = connect(lambda text: print(text, file=sys.stderr), patience=5)
        if account:
            user = f"system:serviceaccount:{namespace}:{own_name(account)}"
            client.set_default_header("Impersonate-User", user)
        return Namespace(client, namespace)

    def look(self) -> Iterator[Finding]:
        """Yield each check as soon as it is made: first the objects, then what pods see."""
        cluster, name = self._cluster, self._cluster.namespace
        path = f"/api/v1/namespaces/{name}"
        try:
            yield objects.check_version(cluster.call("GET", "/version"))
        except Refused as refused:
            yield _not_seen("API server", refused)
            return
        for finding in _try("namespace", lambda: [objects.check_namespace(cluster.get_path(path), name)]):
            yield finding
            if finding.state == "fail":
                return
        executor = (*objects.EXECUTOR, *objects.GROUPS[self._groups.name])
        yield from _try("several nodes", lambda: objects.check_several_nodes(cluster, self._groups))
        yield from _try("rights", lambda: [objects.check_rights(cluster, "yours", (*executor, *objects.STORAGE_KEYS))])
        yield from _try("rights of accounts", lambda: self._rights_of_accounts(executor))
        for claim in inside.FOLDERS:
            yield from _try(f"claim {claim}", partial(self._claim, claim))
        yield from _try("pod templates", self._read_templates)
        token = own_name("hf-token")
        yield from _try("hub token", lambda: [objects.check_secret(cluster.get("secrets", token), self._hub)])
        yield from _try("controller", self._controller)
        if all(template in self._templates for template in NAMES):
            resource = needs.gpu_resource(self._templates["gpu"])
            yield from _try("GPUs", self._look_at_nodes)
            yield from _try("quota", lambda: [needs.check_quota(cluster.list("resourcequotas"), resource, self._needs)])
            yield from self._look_inside(resource)

    def _rights_of_accounts(self, executor: tuple[objects.Right, ...]) -> list[Finding]:
        findings, name = [], self._cluster.namespace
        if self._cluster.get("serviceaccounts", own_name("vlmflow-controller")):
            findings.append(objects.check_rights(self._as(name, "vlmflow-controller"), "controller", executor))
        return [*findings, objects.check_job_service_account(self._as(name, "vlmflow-job"))]

    def _claim(self, name: str) -> Iterator[Finding]:
        claim = own_name(name)
        yield objects.check_claim(self._cluster.get("persistentvolumeclaims", claim), claim)

    def _read_templates(self) -> Iterator[Finding]:
        templates = {template["metadata"]["name"]: template for template in templates_of(self._cluster)}
        finding = objects.check_templates(templates)
        if finding.state != "fail":
            self._templates = templates
        yield finding

    def _controller(self) -> Iterator[Finding]:
        if deployment := self._cluster.get("apps/v1/deployments", own_name("controller")):
            yield from self._claim(STATE_CLAIM)
        yield objects.check_controller(deployment)

    def _look_at_nodes(self) -> Iterator[Finding]:
        self._nodes = self._cluster.call("GET", "/api/v1/nodes")["items"]
        yield from needs.check_nodes(self._nodes, self._templates, self._needs)

    def _look_inside(self, gpu_resource: str) -> Iterator[Finding]:
        # Without the right to list nodes, try the run's own number: its pod starts, or shows why it cannot.
        wanted = max((need.gpus for need in self._needs), default=0)
        gpus = needs.most_gpus(self._nodes, gpu_resource) if self._nodes else wanted
        probes: list[Probe[Any]] = []
        left = f".doctor-{uuid.uuid4()}"
        try:
            for name, lock in LOCKS.items():
                probes.append(inside.look_inside(self._cluster, self._templates[name], lock, left))
            for probe, lock in zip(tuple(probes), LOCKS.values(), strict=True):
                answer = probe.answer(self._patience)
                yield from inside.check_inside(answer, lock)
                if answer.report and answer.report.folders:
                    yield from self._look_from_elsewhere(left, answer.node, probes)
            if answer.report:  # the training image runs
                training = inside.train_together(self._cluster, self._templates, self._needs, gpus)
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
            probes.append(inside.look_from_elsewhere(self._cluster, template, left, first))
            seen_from = probes[-1].answer(min(self._patience, PATIENCE_ELSEWHERE))
        yield inside.check_from_elsewhere(seen_from or Answer("", fault="no other node takes our pods"), first)
        if seen_from is None or not seen_from.report:
            probes.append(inside.look_from_elsewhere(self._cluster, template, left, first=""))
            probes[-1].answer(self._patience)


def _try(row: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Refused as refused:
        yield _not_seen(row, refused)


def _not_seen(row: str, refused: Refused) -> Finding:
    if refused.status == 403:
        step = "ask an administrator to run vlmflow doctor"
        return Finding(row, "warn", f"you have no right to read it: {refused}", step)
    return Finding(row, "fail", str(refused), "check that KUBECONFIG names the right cluster and the API server is up")
