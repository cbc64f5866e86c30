"""The card of a published adapter."""

from dataclasses import dataclass

from vlmflow.config.source import HubSource, parse_source
from vlmflow.reports.accounts import Provenance
from vlmflow.reports.licences import hub_datasets
from vlmflow.reports.page import render


@dataclass(frozen=True)
class AdapterCard:
    """The card's facts. base: the base's name on the hub; None for a local one. datasets: the hub's names of the data.

    pipeline: the task, as the hub names it. sha256: of the adapter's weights.
    """

    facts: Provenance
    base: str | None
    datasets: list[str]
    pipeline: str
    sha256: str


def adapter_card(facts: Provenance, sha256: str) -> str:
    """Return the README.md of an adapter, with the hub's metadata block on top. sha256: of its weights."""
    source = parse_source(facts.base_model.source)
    base = source.repo if isinstance(source, HubSource) else None
    pipeline = "image-text-to-text" if facts.sees_pictures else "text-generation"
    datasets = hub_datasets(*(one.rights for one in facts.rounds))
    return render("publish/adapter.md.jinja", AdapterCard(facts, base, datasets, pipeline, sha256))
