"""The doctor's judgement of a cluster's answers. tests/remote/cluster tests the answers themselves."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from vlmflow.config.model import check_config
from vlmflow.remote import doctor, folder_trials
from vlmflow.remote.doctor import Finding, check_folder, hub_sources
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes import inside, needs, objects
from vlmflow.remote.kubernetes.inside import Answer
from vlmflow.remote.kubernetes.needs import Need, jobs_of
from vlmflow.remote.kubernetes.templates import template_in
from workflow_runs import ROOT, vlmflow

TEMPLATES = {
    file.stem: template_in(yaml.safe_load(file.read_text()))
    for file in (ROOT / "k8s/templates").glob("*.yaml")
    if file.stem != "kustomization"
}
TRAIN = RuleJob("train_model", threads=20, mem_mb=200_000, disk_mb=20_000, gpus=4, template="gpu")
MERGE = RuleJob("merge_weights", threads=4, mem_mb=4_000, disk_mb=1_000, template="train")
A100 = Need("big", 4, 17_500, (TRAIN, MERGE))


def node(gpus: int = 4, taints: tuple = (), memory: str = "500Gi", **more: str) -> dict:
    amounts = {"nvidia.com/gpu": str(gpus), "memory": memory, "cpu": "32", "ephemeral-storage": "100G", "pods": "110"}
    return {
        "metadata": {"name": "n"},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": amounts | {name.replace("_", "-"): amount for name, amount in more.items()}},
    }


def run_check(*nodes: dict, template: dict = TEMPLATES["gpu"], need: Need = A100) -> Finding:
    return list(needs.check_nodes(list(nodes), TEMPLATES | {"gpu": template}, [need]))[1]


def test_a_controller_whose_state_jobs_can_write_is_a_failure() -> None:
    deployment = yaml.safe_load((ROOT / "k8s/base/controller.yaml").read_text()) | {"status": {"availableReplicas": 1}}
    assert objects.check_controller(deployment).state == "ok"
    spec = deployment["spec"]["template"]["spec"]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "state"]
    check = objects.check_controller(deployment)
    assert (check.state, check.next_step) == ("fail", "see docs/kubernetes.md, Upgrade")


def test_the_controllers_role_is_what_the_executor_uses() -> None:
    documents = list(yaml.safe_load_all((ROOT / "k8s/base/accounts.yaml").read_text()))
    role = next(document for document in documents if document["kind"] == "Role")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted - {("", "podtemplates", "list")} == {
        (right.group, right.resource, right.verb) for right in objects.EXECUTOR
    }


def test_the_requests_of_runs_come_from_the_configuration() -> None:
    settings = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [])
    need = needs.need_of(settings, "qwen3vl-fire", [TRAIN, MERGE])
    assert (need.processes, need.weights_mb, need.gpus) == (4, 17_500, 4)
    assert "hf://Qwen/Qwen3-VL-32B-Instruct" in hub_sources(settings, ["qwen3vl-fire"])


def test_a_node_that_has_all_can_hold_a_run() -> None:
    found = run_check(node(), node(gpus=2)).found
    assert found.startswith("each of its 2 rules fits on a node; train_model (20 cores, 200 GB of")
    assert found.endswith("fits on 1")


def test_the_requests_of_a_run_come_from_its_rules(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("runs: {qwen3vl-fire: {processes: 2, train: {dataloader_workers: 3}}}")
    files = [ROOT / "profiles/kubernetes/stores.yaml", mine]
    found = jobs_of("qwen3vl-fire", files)
    jobs = {job.rule: replace(job, wildcards={}, runtime=0) for job in found}
    assert {"fetch_rows", "fetch_model", "convert_rows", "train_model", "verify_merged", "publish_merged"} < jobs.keys()
    assert jobs["train_model"] == replace(TRAIN, threads=8, mem_mb=262_144, gpus=2)
    assert jobs["merge_weights"] == MERGE
    fewer = jobs_of("qwen3vl-fire", files, max_threads=2)
    assert {job.threads for job in fewer} == {1, 2}
    mine.write_text("runs: {qwen3vl-fire: {nodes: 2}}")
    on_nodes = jobs_of("qwen3vl-fire", files)
    assert {job.rule for job in on_nodes if job.nodes == 2} == {"train_smoke", "train_model"}


def test_a_rule_that_fits_on_no_node_is_named_even_if_the_training_fits() -> None:
    small, large = node(gpus=0, cpu="3920m"), node(cpu="24", ephemeral_storage="900M")
    check = run_check(small, large, need=Need("big", 4, 17_500, (MERGE,)))
    assert (check.what, check.state) == ("rule merge_weights, run big", "fail")
    assert "1 node: 3.9 of 4 cores" in check.found
    assert "1 node: 0.9 of 1 GB of node disk" in check.found


def test_several_jobs_of_a_rule_that_ask_the_same_are_reported_once() -> None:
    merges = tuple(replace(MERGE, wildcards={"run": run}) for run in "ab")
    findings = list(needs.check_nodes([node(cpu="2")], TEMPLATES, [Need("big", 4, 17_500, merges)]))
    assert [finding.what for finding in findings] == ["GPUs", "rule merge_weights, run big"]


@pytest.mark.parametrize(
    ("unfit", "why"),
    [
        (node(gpus=2), "2 of 4 nvidia.com/gpu"),
        (node(cpu="8"), "8 of 20 cores"),
        (node(ephemeral_storage="10G"), "10 of 20 GB of node disk"),
        (node(memory="100Gi"), "107.3 of 200 GB of memory"),
        (node(taints=({"key": "reserved", "value": "x", "effect": "NoSchedule"},)), "taint reserved is not tolerated"),
        (node() | {"spec": {"unschedulable": True}}, "cordoned"),
        (node(gpus=0), "0 of 4 nvidia.com/gpu"),
    ],
)
def test_a_run_that_fits_nowhere_is_reported_with_the_reasons(unfit: dict, why: str) -> None:
    check = run_check(unfit)
    assert check.state == "fail"
    assert f"1 node: {why}" in check.found


def test_cards_that_are_too_small_for_the_weights_are_refused() -> None:
    small = node() | {"metadata": {"labels": {"nvidia.com/gpu.memory": "15360"}}}
    assert "needs 18 GB for weights and has 16 GB" in run_check(small).found
    large = node() | {"metadata": {"labels": {"nvidia.com/gpu.memory": "81920"}}}
    assert run_check(large).state == "ok"


def test_affinity_and_resource_name_of_the_template_decide() -> None:
    expression = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["A100"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    template = TEMPLATES["gpu"] | {"template": {"spec": {"affinity": affinity}}}
    labelled = node() | {"metadata": {"labels": {"nvidia.com/gpu.product": "A100"}}}
    assert run_check(labelled, template=template).state == "ok"
    assert "affinity excludes it" in run_check(node(), template=template).found
    renamed = template | {"metadata": {"annotations": {"vlmflow/gpu-resource": "nvidia.com/a100"}}}
    assert "0 of 4 nvidia.com/a100" in run_check(labelled, template=renamed).found


def test_a_quota_that_leaves_too_little_is_named() -> None:
    hard = {"requests.nvidia.com/gpu": "8", "requests.memory": "1Ti", "pods": "10"}
    quota = {"metadata": {"name": "q"}, "status": {"hard": hard, "used": {"requests.nvidia.com/gpu": "5"}}}
    check = needs.check_quota([quota], "nvidia.com/gpu", [A100])
    assert (check.state, check.found) == ("fail", "q leaves 3 GPUs, a run requests 4")
    quota["status"]["used"] = {}
    assert needs.check_quota([quota], "nvidia.com/gpu", [A100]).state == "ok"
    assert needs.check_quota([], "nvidia.com/gpu", [A100]).found == "none set"


def test_claims_are_bound_and_shared() -> None:
    claim = {"spec": {"storageClassName": "fast"}, "status": {"phase": "Pending"}}
    assert "Pending, storage class: fast" in objects.check_claim(claim, "cache").found
    claim["status"] = {"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}}
    assert objects.check_claim(claim, "cache").state == "warn"
    claim["status"]["accessModes"] = ["ReadWriteMany"]
    assert objects.check_claim(claim, "cache") == Finding("claim cache", "ok", "1Gi, ReadWriteMany, fast")
    assert objects.check_claim(None, "cache").state == "fail"


def test_templates_are_complete_and_run_the_rule() -> None:
    check = objects.check_templates(TEMPLATES)
    assert check == Finding("pod templates", "ok", "answer, default, fetch, gpu, search, train")
    broken = json.loads(json.dumps({name: template for name, template in TEMPLATES.items() if name != "default"}))
    broken["gpu"]["template"]["spec"]["containers"][0]["name"] = "main"
    found = objects.check_templates(broken).found
    assert found == "default does not exist; gpu has no container named snakemake"


def test_the_packages_of_an_image_are_those_of_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "data.lock"
    lock.write_text(
        "a-b==1.0 ; python_full_version >= '3.11' \\\n    --hash=sha256:0\nold==1 ; python_full_version < '3.11' \\\n"
        "c[extra]==2.0 \\\n    --hash=sha256:1\n"
    )
    assert inside.check_image("i", "3.12.1", {"A_B": "1.0", "c": "2.0", "more": "1"}, lock).state == "ok"
    found = inside.check_image("i", "3.12.1", {"a-b": "1.1"}, lock).found
    assert found.endswith("a-b 1.1 instead of 1.0, c missing instead of 2.0")
    assert len(inside.locked_versions(ROOT / "envs/data.lock", "3.11.2")) > 80


def in_a_pod(*words: object) -> inside.Surroundings:
    command = [sys.executable, folder_trials.__file__, *map(str, words)]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    said = doctor.last_of_form(log, inside.Surroundings)
    assert said is not None, log
    return said


def test_one_pod_tries_a_volume_and_another_reads_the_same_files(tmp_path: Path) -> None:
    said = in_a_pod("leave", ".doctor-1", tmp_path, "/proc/no-such")
    assert said.folders[str(tmp_path)] == {}
    assert "No such file" in said.folders["/proc/no-such"]["write"]
    assert said.packages["snakemake"]
    found = in_a_pod("find", ".doctor-1", tmp_path, tmp_path / "unshared").folders
    assert found[str(tmp_path)] == {}
    assert "No such file" in found[str(tmp_path / "unshared")]["see"]
    assert list(tmp_path.iterdir()) == []


def test_the_answer_is_the_last_line_of_its_form() -> None:
    line = '{"backend": "gloo", "processes": 2}'
    log = f'{{"processes": 1}}\n{line}\n{{"processes": "two"}}\n[2]\nTraceback'
    assert doctor.last_of_form(log, inside.TrialTraining) == inside.TrialTraining(backend="gloo", processes=2)
    assert doctor.last_of_form(log, inside.Surroundings) is None


def test_the_next_probe_removes_a_dead_probes_files(tmp_path: Path) -> None:
    in_a_pod("leave", ".doctor-1", tmp_path)
    os.utime(tmp_path / ".doctor-1", (1, 1))
    in_a_pod("leave", ".doctor-2", tmp_path)
    assert [place.name for place in tmp_path.iterdir()] == [".doctor-2"]


def test_a_lock_that_two_can_hold_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre without -o flock, where flock succeeds or does nothing."""
    assert folder_trials.leave(str(tmp_path), ".doctor-1") == {}
    monkeypatch.setattr(folder_trials.fcntl, "flock", lambda *_: None)
    wrong = folder_trials.leave(str(tmp_path), ".doctor-2")
    assert wrong == {"flock": "two processes hold one lock"}
    check = check_folder("volume /outputs", wrong, 1000, "chown it")
    assert (check.state, "mount Lustre with -o flock" in check.next_step) == ("fail", True)
    assert check_folder("volume /outputs", {"hard_link": "Operation not permitted"}, 1000, "").state == "warn"


def test_a_volume_that_a_second_node_cannot_see_fails() -> None:
    def looked(folders: dict[str, dict[str, str]]) -> Answer:
        return Answer("i", report=inside.Surroundings(1000, 0.0, "3.12.1", folders, {}), node="b")

    unseen = looked({"/cache": {}, "/outputs": {"see": "No such file"}})
    check = inside.check_from_elsewhere(unseen, "a")
    assert (check.state, check.found) == ("fail", "b does not see what a wrote: /outputs: No such file")
    assert inside.check_from_elsewhere(Answer("i", fault="no place"), "a").state == "warn"
    assert inside.check_from_elsewhere(looked({"/cache": {}}), "a").state == "ok"


NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("ahead", "state"), [(-100, "fail"), (0, "ok"), (5, "ok"), (25, "ok"), (60, "fail")])
def test_clocks_are_compared_between_two_answers_of_the_server(ahead: int, state: str) -> None:
    told = (NOW + timedelta(seconds=ahead)).timestamp()
    check = inside.check_clock(told, Answer("i", made=NOW, ended=NOW + timedelta(seconds=10)))
    assert check.state == state


def test_training_together_reports_its_speed_or_the_fault() -> None:
    said = inside.TrialTraining("", "gloo", 2, "CPU", 0.5, 64)
    assert "0.5 GB/s" in inside.check_training(Answer("i", report=said)).found
    short = Answer(
        "i", report=inside.TrialTraining("process 0: RuntimeError: unable to write: No space left on device")
    )
    assert "sizeLimit" in inside.check_training(short).next_step
    assert inside.check_training(replace(short, report=None, fault="OOMKilled, exit code 137")).state == "fail"


def test_a_probe_is_the_template_with_another_command() -> None:
    made = inside.probe_job(TEMPLATES["train"], ["python"], {"cpu": "1"})
    spec, container = made["spec"]["template"]["spec"], made["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python"]
    assert container["resources"] == {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}
    assert spec["securityContext"] == TEMPLATES["train"]["template"]["spec"]["securityContext"]
    assert TEMPLATES["train"]["template"]["spec"]["containers"][0]["command"] != ["python"]


def test_a_probe_has_the_labels_of_a_runs_jobs_and_keeps_off_a_node() -> None:
    """Kueue, for example, holds or refuses Jobs without a queue's label."""
    template = json.loads(json.dumps(TEMPLATES["gpu"]))
    template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "research"
    made = inside.probe_job(template, ["python"], {"cpu": "1"}, elsewhere_than="node-a")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    affinity = made["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert all(
        {"key": "metadata.name", "operator": "NotIn", "values": ["node-a"]} in term["matchFields"] for term in terms
    )


class OnePod:
    """A namespace with one pod at most, which ends when a test says so."""

    def __init__(self, events: list[dict], pod: dict | None = None, log: str = "") -> None:
        self.found, self.told, self.text, self.looks, self.deleted = pod, events, log, 0, []

    def create_job(self, job: dict) -> None:
        self.name = job["metadata"]["name"]

    def delete_job(self, name: str) -> None:
        self.deleted.append(name)

    def now(self) -> datetime:
        return NOW

    def pods(self, selector: str) -> list[dict]:
        self.looks += 1
        return [self.found] if self.found else []

    def events(self) -> list[dict]:
        return [event | {"involvedObject": {"kind": "Job", "name": self.name}} for event in self.told]

    def log(self, pod: str, container: str) -> str:
        return self.text


def asked(cluster: OnePod, patience: float = 60) -> Answer:
    probe = inside.Probe(cluster, inside.Surroundings, inside.probe_job(TEMPLATES["default"], ["python"]))
    answer = probe.answer(patience)
    assert cluster.deleted == [cluster.name]
    return answer


def refused(message: str) -> dict:
    return {"reason": "FailedCreate", "message": f"Error creating: {message}"}


MODIFIED = 'Operation cannot be fulfilled on resourcequotas "vlmflow": the object has been modified'
UNCOUNTED = 'pods "x" is forbidden: status unknown for quota: vlmflow, resources: requests.memory'
QUOTA = 'pods "x" is forbidden: exceeded quota: vlmflow, requested: pods=1, used: pods=3, limited: pods=3'


def pending(reason: str, message: str) -> dict:
    state = {"name": "snakemake", "image": "i:1", "state": {"waiting": {"reason": reason, "message": message}}}
    return {
        "metadata": {"name": "p", "labels": {}},
        "spec": {"nodeName": "a", "containers": []},
        "status": {"phase": "Pending", "containerStatuses": [state]},
    }


@pytest.mark.parametrize(
    ("events", "pod", "words"),
    [
        ([refused(QUOTA)], None, "quota vlmflow is exhausted: requested pods=1, used pods=3, limit pods=3"),
        ([refused('pods "x" is forbidden: violates PodSecurity')], None, "is forbidden: violates PodSecurity"),
        ([], pending("ImagePullBackOff", "Back-off pulling"), "image i:1 cannot be pulled: Back-off pulling"),
        ([], pending("CreateContainerConfigError", 'secret "x" not found'), 'cannot start: secret "x" not found'),
    ],
)
def test_a_probe_that_the_cluster_refuses_is_not_waited_for(events: list[dict], pod: dict | None, words: str) -> None:
    cluster = OnePod(events, pod)
    answer = asked(cluster)
    assert (cluster.looks, answer.report) == (1, None)
    assert answer.fault.startswith("its pod does not start: ")
    assert words in answer.fault


@pytest.mark.parametrize(
    ("events", "pod"),
    [
        ([refused(MODIFIED)], None),
        ([refused(UNCOUNTED)], None),
        ([], None),
        ([], pending("ContainerCreating", "")),
        ([], pending("CreateContainerConfigError", "timed out waiting for the condition")),
    ],
)
def test_a_probe_that_is_refused_for_a_moment_is_waited_for(
    events: list[dict], pod: dict | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "POLL", 0.0)
    cluster = OnePod(events, pod)
    assert asked(cluster, 0.05).fault.startswith("its pod does not start: ")
    assert cluster.looks > 1


def test_a_probe_that_ends_without_a_report_says_why() -> None:
    pod = pending("", "")
    ended = {"name": "snakemake", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    pod["status"] = {"phase": "Failed", "containerStatuses": [ended]}
    assert asked(OnePod([], pod)).fault == ("its pod ended as Failed: killed: it needed more memory than its limit")
    assert asked(OnePod([], pod, "Traceback\n")).fault == "its pod ended as Failed: Traceback"
    pod["status"] = {"phase": "Succeeded"}
    assert asked(OnePod([], pod)).fault == "its pod ended as Succeeded: it says nothing"


def test_table_and_json_say_whether_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Finding("a", "ok", "fine"), Finding("b", "fail", "gone", "bring it")
    for findings, ready in (([good], True), ([good, bad], False)):
        assert doctor.report(findings, as_json_text=True) == (0 if ready else 1)
        assert json.loads(capsys.readouterr().out)["ready"] is ready
    assert "what to do: bring it" in doctor.as_line(bad, colours=False)
    assert "\x1b" not in doctor.as_line(bad, colours=False)


def test_a_configuration_that_is_not_yaml_is_refused_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("runs:\n  r: {model: m\n  b: [\n")
    done = subprocess.run(vlmflow("doctor", file), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{file}, line 3, column 4: expected ',' or '}}', but got ':' while parsing")
    assert "begun in line 2, column 6; the line is: b: [\n  what to do: " in done.stderr
