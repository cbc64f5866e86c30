"""Refuses relative paths if jobs do not see this folder, as in pods: bulk data needs a place that all of them share."""

import sys
from pathlib import Path
from typing import Any

from snakemake_interface_executor_plugins.settings import SharedFSUsage

from vlmflow.config.data_settings import RAW_SPLITS
from vlmflow.config.model import Config
from vlmflow.config.source import base_run, parse_source

ADVICE = (
    "what to do: on a cluster, stores must be on its volumes; put profiles/kubernetes/stores.yaml before your own file "
    "(--configfile profiles/kubernetes/stores.yaml my-run.yaml), and use absolute paths in yours"
)


def refuse_relative_stores(workflow: Any, settings: Config) -> None:
    """End the process if jobs run elsewhere and a store, a picture root or a local source is a relative path.

    A pod's working directory disappears with the pod: what is stored there is lost without an error.
    """
    if SharedFSUsage.INPUT_OUTPUT in workflow.storage_settings.shared_fs_usage or not workflow.is_main_process:
        return
    relative = [f"{key}: {place} is relative to the working directory" for key, place in relative_places(settings)]
    if relative:
        sys.exit("\n".join([*relative, f"  {ADVICE}"]))


def relative_places(settings: Config) -> list[tuple[str, str]]:
    """Return key and value of every relative path in the configuration that stages read or write, except targets."""
    places = [(f"stores.{name}", place) for name, place in settings.stores]
    places += [(f"models.{name}.source", model.source) for name, model in settings.models.items()]
    for name, dataset in settings.raw_datasets.items():
        places += [(f"datasets.{name}.image_roots.{number}", root) for number, root in enumerate(dataset.image_roots)]
        for split in RAW_SPLITS:
            places += [(f"datasets.{name}.{split}", address) for address in dataset.addresses(split)]
    return [(key, place) for key, place in places if _is_relative(place)]


def _is_relative(place: str) -> bool:
    source = parse_source(place)
    return isinstance(source, Path) and not source.is_absolute() and not base_run(place)
