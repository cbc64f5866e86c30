"""What keeps jobs apart from the controller: their pods hold no token, and mount nothing that it executes.

The controller's token may create Jobs, and a Job may mount any Secret of its namespace. Who writes what the controller
executes has all of that.
"""

import re

from vlmflow.cluster.api import Object
from vlmflow.core.errors import VlmflowError
from vlmflow.doctor.objects import STATE_CLAIM

CONTROLLER_ACCOUNT = "vlmflow-controller"
"""The service account that the controller's Role belongs to; or a part of its name."""

SOURCES = "/workdir/.sources"
"""Where a pod puts the archive of the workflow's sources: on a volume that is the pod's alone."""

DEPLOYS = re.compile(r"-m snakemake --deploy-sources [^&;|]+")


def refuse_reach(where: str, pod: Object, next_step: str) -> None:
    """Refuse a job's pod that could write what the controller executes, or ask the API in its name.

    where: begins the message. pod: a pod's spec. next_step: what the message says to do.

    Raises VlmflowError.
    """
    if pod.get("automountServiceAccountToken") is not False:
        raise VlmflowError(f"{where}: automountServiceAccountToken is not false: a job's pod holds no token", next_step)
    if CONTROLLER_ACCOUNT in (pod.get("serviceAccountName") or ""):
        raise VlmflowError(
            f"{where}: serviceAccountName is {pod['serviceAccountName']}, which is the controller's", next_step
        )
    for volume in pod.get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        if STATE_CLAIM in claim:
            raise VlmflowError(
                f"{where}: volume {volume['name']} is the claim {claim}, with what the controller executes", next_step
            )
        for source in (volume.get("projected") or {}).get("sources") or []:
            # One for another audience (a cloud's identity service) says nothing to the API server.
            if "serviceAccountToken" in source and not source["serviceAccountToken"].get("audience"):
                raise VlmflowError(
                    f"{where}: volume {volume['name']} holds a token for the API server (a serviceAccountToken "
                    "without an audience)",
                    next_step,
                )


def with_private_sources(command: str) -> str:
    """Have a pod put the archive of the sources where it alone writes.

    Snakemake compares the archive with the sha256 in the command, and then opens it once more to unpack it. In the
    folder for outputs, on the volume of all jobs, another pod could exchange it in between.
    """
    return DEPLOYS.sub(lambda found: f"{found[0].rstrip()} --local-storage-prefix {SOURCES} ", command, count=1)
