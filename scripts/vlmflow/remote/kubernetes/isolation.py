"""Isolates jobs from the controller: their pods hold no token, and mount nothing that the controller executes.

The controller's token may create Jobs, and a Job may mount any Secret of its namespace. A pod that could write what the
controller executes would get all of these rights.
"""

import re

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import Object
from vlmflow.remote.doctor.objects import STATE_CLAIM

CONTROLLER_ACCOUNT = "vlmflow-controller"
"""The service account with the controller's Role; an overlay may add to this name."""

SOURCES = "/workdir/.sources"
"""Where a pod puts the archive of the workflow's sources: on a volume of its own."""

DEPLOYS = re.compile(r"-m snakemake --deploy-sources [^&;|]+")


def refuse_reach(where: str, pod: Object, next_step: str) -> None:
    """Refuse a job's pod that could write what the controller executes, or call the API in its name.

    where: the start of the message. pod: a pod's spec. next_step: the next step of the message.

    Raises VlmflowError.
    """
    if pod.get("automountServiceAccountToken") is not False:
        raise VlmflowError(
            f"{where}: automountServiceAccountToken must be false: a job's pod may not hold a token", next_step
        )
    if CONTROLLER_ACCOUNT in (pod.get("serviceAccountName") or ""):
        raise VlmflowError(
            f"{where}: serviceAccountName is {pod['serviceAccountName']}, the controller's own account", next_step
        )
    for volume in pod.get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        if STATE_CLAIM in claim:
            raise VlmflowError(
                f"{where}: volume {volume['name']} is the claim {claim}, which holds what the controller executes",
                next_step,
            )
        for source in (volume.get("projected") or {}).get("sources") or []:
            # The API server ignores a token for another audience (a cloud's identity service).
            if "serviceAccountToken" in source and not source["serviceAccountToken"].get("audience"):
                raise VlmflowError(
                    f"{where}: volume {volume['name']} holds a token for the API server (a serviceAccountToken "
                    "without an audience)",
                    next_step,
                )


def with_private_sources(command: str) -> str:
    """Return the command with the archive of the sources in a folder that the pod alone can write.

    Snakemake compares the archive with the sha256 in the command, and then opens it again to unpack it. In the folder
    for outputs, on the volume of all jobs, another pod could replace it in between.
    """
    return DEPLOYS.sub(lambda found: f"{found[0].rstrip()} --local-storage-prefix {SOURCES} ", command, count=1)
