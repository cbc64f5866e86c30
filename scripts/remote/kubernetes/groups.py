"""The command of a training on several nodes.

Node 0 runs the rule, as the only pod of any other Job does. The others run `vlmflow.supervisor.other_node`, with the
same sources: each pod unpacks the archive whose sha256 is in its own command.
"""

import shlex

from remote.cluster.api import Object
from remote.cluster.pod_group import NODE, main_container, with_pods
from remote.kubernetes.isolation import DEPLOYS
from vlmflow.core.attempt import ATTEMPT, OTHER_NODE
from vlmflow.core.errors import VlmflowError


def on_nodes(job: Object, nodes: int, runs: str, threads: int) -> Object:
    """Return a rule's Job with a pod on each node; it has no name yet (`pod_group.named`).

    runs: the folder with the run folders of the rule's run, on a volume that all pods see. threads: cores of a pod.
    """
    job = with_pods(job, nodes)
    container = main_container(job)
    rule = container["args"][1]
    container["args"] = [container["args"][0], _command(rule, runs, threads)]
    return job


def _command(rule: str, runs: str, threads: int) -> str:
    """Return the shell command of all pods. rule: the one that runs the rule."""
    sources = DEPLOYS.search(rule)
    if sources is None:
        raise VlmflowError(
            "runs.NAME.nodes: the other nodes get no sources, because Snakemake does not deploy them",
            "remove shared-fs-usage: sources and job-deploy-sources from the profile, or set nodes: 1",
        )
    words = ["-m", OTHER_NODE, shlex.quote(runs), f'"${ATTEMPT}"', f'"${NODE}"', str(threads)]
    python = 'PYTHONPATH="$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}" exec python'
    other = f"{rule[: sources.end()].rstrip()} && {python} {' '.join(words)}"
    return f'if [ "${NODE}" = 0 ]; then {rule}; else {other}; fi'
