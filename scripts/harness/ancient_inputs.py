"""Jobs after an `ancient` input: Snakemake 9.27 forgets to compare them.

`DAG.update_needrun` skips each job downstream of one that will run, because that job runs then as well; but past an
`ancient` input it does not. Without this module, a setting of the estimate and of the smoke run makes only the estimate
again when it changes, and weights that were trained with the old value pass as those of the new one.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any


def install(dag: Any) -> None:
    """Make Snakemake compare jobs that only `ancient` files connect to jobs that run. Call it before planning."""
    update_needrun, bfs = dag.update_needrun, dag.bfs

    @wraps(bfs)
    def past_no_ancient_input(direction: Any, *jobs: Any) -> Iterator[Any]:
        reached = list(jobs)
        for job in reached:
            yield job
            following = direction[job].items()
            reached += [next_job for next_job, files in following if next_job not in reached and not _is_ancient(files)]

    @wraps(update_needrun)
    async def updated(*args: Any, **options: Any) -> None:
        dag.bfs = past_no_ancient_input
        try:
            await update_needrun(*args, **options)
        finally:
            dag.bfs = bfs

    dag.update_needrun = updated


def _is_ancient(files: Any) -> bool:
    return all(file.is_ancient for file in files)
