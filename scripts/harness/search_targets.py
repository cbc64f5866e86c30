"""The results of a search's trials are targets of whoever asks for the search.

Snakemake leaves a missing file alone as long as nothing that needs it has to be made. A search would then name a best
trial whose result is gone, and nobody would notice. As a target it is made again, in seconds: its training is kept.
"""

import re
from typing import Any

from harness import patches
from harness.search_inputs import SearchInputs
from vlmflow.config.model import Config

OF_A_SEARCH = re.compile(r"(?:^|/)(?:search/([^/]+)/best\.yaml|reports/search-([^/]+)\.html)$")
"""The files that are made of all results; a default storage puts its prefix before them."""


def install(workflow: Any, settings: Config) -> None:
    """Add the results to the targets of the command. Call it before planning."""
    inputs = SearchInputs(settings)
    asked = {name for file in workflow.dag.targetfiles for name in _searches_of(file) if name in settings.search}
    patches.ask_for(workflow, (file for name in sorted(asked) for file in inputs.results_of_search(name)))


def _searches_of(file: str) -> list[str]:
    found = OF_A_SEARCH.search(str(file))
    return [name for name in found.groups() if name] if found else []
