"""The files that the rules of a search need: those of its run, and those of its steps."""

import re
from collections.abc import Callable
from typing import Any

from snakemake.iocontainers import Wildcards

from vlmflow.config.model import Config
from vlmflow.config.search_steps import slots_of, step_before, steps_of
from vlmflow.harness import patches

Files = Callable[[Any], Any]
"""An input function: takes Snakemake's wildcards, returns file names."""

OF_A_SEARCH = re.compile(r"(?:^|/)(?:search/([^/]+)/best\.yaml|reports/search-([^/]+)\.html)$")
"""The files that are made of all results; a default storage puts its prefix before them."""


class SearchInputs:
    """The input functions of rules with wildcard `search`; `RuleInputs` has them too."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def of_search(self, files: Files | str) -> Files:
        """The files of the run of wildcard `search`: those of an input function, or of a name with `{run}`.

        Functions of params and resources are asked in the same way.
        """

        def of_its_run(wildcards: Any) -> Any:
            run = self._settings.search[wildcards.search].run
            return files.format(run=run) if isinstance(files, str) else files(Wildcards(fromdict={"run": run}))

        return of_its_run

    def judged(self, files: Files) -> Files:
        """Files of the search's run, if the search judges its trials by the evaluation; otherwise none."""

        def if_evaluated(wildcards: Any) -> list[str]:
            if self._settings.search[wildcards.search].objective == "eval_loss":
                return []
            found = self.of_search(files)(wildcards)
            return [found] if isinstance(found, str) else list(found)

        return if_evaluated

    def search_pace(self, wildcards: Any) -> list[str]:
        """The smoke run of the run of wildcard `search`, if only that tells what the search's budget is compared with.

        The estimate knows the time of a run on a GPU product that its settings name.
        """
        search = self._settings.search[wildcards.search]
        run = self._settings.runs[search.run]
        measured = search.limits.gpu_hours is not None and (run.gpu is None or run.device == "cpu")
        return [f"checkpoints/{search.run}/smoke"] if measured else []

    def step_before(self, file: str) -> Files:
        """A file of the step before that of wildcards `search`, `round` and `rung`; none before the first."""

        def files(wildcards: Any) -> list[str]:
            rungs = self._settings.search[wildcards.search].rungs
            step = step_before(rungs, int(wildcards.round), int(wildcards.rung))
            return [_step(wildcards.search, *step, file)] if step else []

        return files

    def step_results(self, wildcards: Any) -> list[str]:
        """The results of the trials of one step, in the order of their slots."""
        return self._results(wildcards.search, int(wildcards.round), int(wildcards.rung))

    def search_results(self, wildcards: Any) -> list[str]:
        """The results of all trials of wildcard `search`, in the order of its steps."""
        return self.results_of_search(wildcards.search)

    def results_of_search(self, search: str) -> list[str]:
        """Return the results of all trials of a search, in the order of its steps."""
        steps = steps_of(self._settings.search[search])
        return [file for step in steps for file in self._results(search, *step)]

    def last_study(self, wildcards: Any) -> str:
        """The account of wildcard `search` after its last step."""
        *_, last = steps_of(self._settings.search[wildcards.search])
        return _step(wildcards.search, *last, "study.json")

    def _results(self, search: str, number: int, rung: int) -> list[str]:
        slots = range(slots_of(self._settings.search[search].together, number, rung))
        return [_step(search, number, rung, f"{slot}.json") for slot in slots]


def _step(search: str, number: int, rung: int, file: str) -> str:
    return f"search/{search}/{number}/{rung}/{file}"


def ask_for_results(workflow: Any, settings: Config) -> None:
    """Make the results of a search's trials targets of whoever asks for the search. Call it before planning.

    Snakemake leaves a missing file alone as long as nothing that needs it has to be made. A search would then name a
    best trial whose result is gone, and nobody would notice. As a target it is made again, in seconds: its training is
    kept.
    """
    inputs = SearchInputs(settings)
    asked = {name for file in workflow.dag.targetfiles for name in _searches_of(file) if name in settings.search}
    patches.ask_for(workflow, (file for name in sorted(asked) for file in inputs.results_of_search(name)))


def _searches_of(file: str) -> list[str]:
    found = OF_A_SEARCH.search(str(file))
    return [name for name in found.groups() if name] if found else []
