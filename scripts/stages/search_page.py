"""Write the page of a search."""

from pathlib import Path

from vlmflow.config.search_settings import SearchLimits
from vlmflow.core.account import read_account
from vlmflow.core.files import write_text
from vlmflow.harness.stage import run_stage
from vlmflow.reports.search_page import search_page
from vlmflow.search.best import read_judged, refuse_other_results
from vlmflow.search.study import Study


def main(
    *, study: Path, judged: Path, results: list[Path], page: Path, run: str, limits: SearchLimits, device: str
) -> None:
    """Write the page.

    study: the search's account after its last step. judged: what became of its best trial (judge_best). results: those
    of all its trials. page: the HTML file to write. run: its run. limits: its budget.
    device: on which the run trains.
    """
    account = read_account(study, Study)
    refuse_other_results(account, study, results)
    write_text(page, search_page(account, read_judged(judged, study), run, limits, device))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
