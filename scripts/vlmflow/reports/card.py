"""The model card of merged weights, `merged/RUN/README.md`, with the hub's metadata block on top."""

from typing import Any

from vlmflow.config.run_blocks import own_settings
from vlmflow.config.strategies import tuner_of
from vlmflow.evaluation.verdict import shown_shares
from vlmflow.reports.eval_figures import FUNCTIONS, losses_of
from vlmflow.reports.former_trainings import settings_of
from vlmflow.reports.licences import hub_datasets
from vlmflow.reports.page import render
from vlmflow.reports.provenance import Provenance


def model_card(facts: Provenance) -> str:
    """Return the README.md of merged weights from their provenance."""
    return render(
        "card/card.md.jinja",
        facts=facts,
        tuner=tuner_of(facts.training.tuner),
        datasets=hub_datasets(*(round.rights for round in facts.rounds)),
        results=hub_results(facts),
        settings=own_settings(settings_of(facts.training)),
        **FUNCTIONS,
    )


def hub_results(facts: Provenance) -> list[dict[str, Any]]:
    """Return the evaluations in the form of the hub's model cards (`model-index`, huggingface.co/docs/hub/model-cards).

    Each metric is of the tuned model: a share of rows, or a mean loss in nats per token. The hub shows neither the base
    nor intervals; the card's own tables have them.
    """
    hub_names = hub_datasets(facts.rights)
    task = "image-text-to-text" if facts.sees_pictures else "text-generation"
    return [
        {
            "task": {"type": task},
            "dataset": {
                "name": report.dataset,
                "type": hub_names[0] if hub_names else report.dataset,
                "split": {"val": "validation"}.get(split, split),
            },
            "metrics": [
                {"type": metric, "name": begin + name, "value": round(compared.tuned.mean, 6)}
                for metric, begin, figures in (
                    ("share", "rows in which ", shown_shares(report.figures.all)),
                    ("loss", "", losses_of(report.figures.all)),
                )
                for name, compared in figures
            ],
        }
        for split, report in facts.evaluations.items()
    ]
