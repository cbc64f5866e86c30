"""The kinds of stages that wait in no queue of their own on Slurm: they run here, or several of them in one job."""

from typing import Any

from vlmflow.config.model import Config

KINDS: dict[str, tuple[str, ...]] = {
    "fetch": ("fetch_rows", "fetch_images", "fetch_model", "fetch_model_files"),
    "data": (
        *("resolve_images", "join_images", "hash_pictures", "join_hashes"),
        *("convert_rows", "validate_sharegpt", "mix_rows", "find_near_duplicates"),
        *("measure_lengths", "fit_rows", "estimate_run"),
    ),
    "pages": (
        *("data_page", "lengths_page", "estimate_page", "run_page", "eval_page", "search_page"),
        *("publish_merged", "track", "propose", "tell", "choose_best"),
    ),
}
"""The rules of each kind. What trains, merges, proves and evaluates always has jobs of its own."""


def arrange(workflow: Any, settings: Config) -> None:
    """Let stages run where Snakemake runs (`slurm.here`), or connected ones in one job (`slurm.together`).

    The cores of this machine, a login node, limit what runs here, and no job of Slurm.

    Call it before Snakemake makes its plan. A group that the call gives a rule (--groups) stays.
    """
    workflow.register_resource("_cores", None)
    workflow.resource_settings.cores = None
    names = {rule.name for rule in workflow.rules}
    workflow.localrules(*(rule for kind in settings.slurm.here for rule in KINDS[kind] if rule in names))
    together = {rule: kind for kind in settings.slurm.together for rule in KINDS[kind]}
    given = workflow.group_settings.overwrite_groups
    workflow.group_settings.overwrite_groups = {**together, **given}
