"""Write the page of a search."""

from pathlib import Path
from typing import Any

from harness.stage import run_stage
from vlmflow.config.search_settings import SearchLimits
from vlmflow.config.settings import Settings
from vlmflow.core.account import read_account
from vlmflow.core.files import whole_file
from vlmflow.reports.search_page import search_page
from vlmflow.search.best import refuse_other_results
from vlmflow.search.study import Study


class SearchBlock(Settings):
    """The search's settings that this page uses; see docs/config.md."""

    run: str
    limits: SearchLimits


def main(*, study: Path, results: list[Path], page: Path, settings: SearchBlock, own: dict[str, Any]) -> None:
    """Write the page.

    study: the search's account after its last step. results: those of all its trials.
    page: the HTML file to write. settings: those of the search. own: the values that its run has for the searched keys.
    """
    account = read_account(study, Study)
    refuse_other_results(account, study, results)
    with whole_file(page, "w") as file:
        file.write(search_page(account, settings.run, settings.limits, own))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
