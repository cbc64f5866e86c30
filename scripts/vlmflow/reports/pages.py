"""Small pages for Snakemake's report: what happened to the rows, and what the gate says, as tables."""

from typing import Any

from jinja2 import Environment

from vlmflow.config import raw_forms
from vlmflow.pictures.image_manifest import REASONS as PICTURE_REASONS
from vlmflow.rows.rejects import LEFT_OUT, REASONS

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .3rem .9rem; text-align: left; border-bottom: 1px solid #ddd }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.no { color: #b00020; font-weight: 600 } .yes { color: #1b7a3d }
</style></head><body><h1>{{ title }}</h1>
{% for table in tables %}<h2>{{ table.title }}</h2><table><tr>
{% for head in table.heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}
{% if cell is boolean %}<td class="{{ "yes" if cell else "no" }}">{{ "yes" if cell else "no" }}</td>
{% elif cell is number %}<td class="n">{{ "{:,}".format(cell) }}</td>
{% else %}<td>{{ cell }}</td>{% endif %}{% endfor %}</tr>
{% endfor %}</table>{% endfor %}</body></html>
"""

TEMPLATE = Environment(autoescape=True).from_string(PAGE)


def gate_page(run: str, gate: dict[str, Any]) -> str:
    """Give the gate of a run as an HTML page: checks, figures, the full run's estimate."""
    figures = [
        ["tokens per second", gate["tokens_per_second"]],
        ["peak memory of a process, MB", max(gate["peak_memory"], default=0) // 1_000_000],
        ["rows to train on", gate["lengths"]["rows"]],
        ["tokens of the median row", gate["lengths"]["median"]],
        ["tokens of the longest row", gate["lengths"]["longest"][0]["tokens"]],
        ["full run", gate["full_run"]["readable"]],
    ]
    checks = [[check["check"], check["passed"], check["detail"]] for check in gate["checks"]]
    return TEMPLATE.render(
        title=f"{run}: the gate is {'open' if gate['passed'] else 'closed'}",
        tables=[
            {"title": "Checks", "heads": ["check", "passed", "detail"], "rows": checks},
            {"title": "Measured", "heads": ["figure", "value"], "rows": figures},
            {
                "title": "The longest rows that it is trained on",
                "heads": ["row", "tokens", "of them pictures"],
                "rows": [[row["id"], row["tokens"], row["picture_tokens"]] for row in gate["lengths"]["longest"]],
            },
        ],
    )


def counts_page(stats: dict[str, Any]) -> str:
    """Give the account of a data set (`stats.json`) as an HTML page."""
    splits = raw_splits(stats)
    rows = [[name, *went(stats[name])] for name in splits]
    rejected, left_out = (
        [[name, reason, count, explain(reason)] for name in splits for reason, count in reasons(stats[name]).items()]
        for reasons in (rejects, rows_left_out)
    )
    examples = [[name, count] for name, count in stats["examples"].items()]
    unusable = [
        [name, reason, cost["pictures"], cost["rows"]]
        for name in splits
        for reason, cost in stats["pictures"][name].get("unusable", {}).items()
    ]
    return TEMPLATE.render(
        title=f"{stats['dataset']}: where every row went",
        tables=[
            {"title": "Raw rows", "heads": ["raw split", "rows in", "kept", "rejected", "left out"], "rows": rows},
            {"title": "Why rows were rejected", "heads": ["raw split", "reason", "rows", "meaning"], "rows": rejected},
            {"title": "Why rows were left out", "heads": ["raw split", "reason", "rows", "meaning"], "rows": left_out},
            {
                "title": "Keys that nobody reads, and turns dropped",
                "heads": ["raw split", "what", "rows"],
                "rows": [[name, what, count] for name in splits for what, count in unread(stats, name).items()],
            },
            {"title": "Training rows", "heads": ["split", "lines"], "rows": examples},
            {
                "title": "Unusable pictures",
                "heads": ["raw split", "reason", "pictures", "rows"],
                "rows": unusable,
            },
        ],
    )


def unread(stats: dict[str, Any], split: str) -> dict[str, int]:
    """Give what of a raw split's rows was not read, with the number of rows: keys first, by their names."""
    found = stats["unread"][split]
    ignored = found.get("ignored_keys", {})
    further, dropped = found.get("further_unread_keys", 0), found.get("unanswered_last_turns", 0)
    return {
        **found.get("unread_keys", {}),
        **({"further keys, each counted by itself": further} if further else {}),
        **{f"{key}, where it changes what the row means (ignore_keys)": count for key, count in ignored.items()},
        **({"a last turn that nobody answers, dropped": dropped} if dropped else {}),
    }


def rejects(counts: dict[str, Any]) -> dict[str, int]:
    """Give the rejected rows of a raw split (its part of `stats.json`) by reason, without those left out on purpose."""
    return {reason: count for reason, count in counts["rejected"].items() if reason not in LEFT_OUT}


def rows_left_out(counts: dict[str, Any]) -> dict[str, int]:
    """Give the rows of a raw split that the configuration does not ask for, by reason."""
    return {reason: count for reason, count in counts["rejected"].items() if reason in LEFT_OUT}


def went(counts: dict[str, Any]) -> tuple[int, int, int, int]:
    """Give the rows of a raw split: all, kept, rejected, left out; the first is the sum of the others."""
    return (
        counts["rows_in"],
        counts["kept"],
        sum(rejects(counts).values()),
        sum(rows_left_out(counts).values()),
    )


def raw_splits(stats: dict[str, Any]) -> list[str]:
    """Give the raw splits of which `stats.json` gives an account."""
    return [name for name in ("train", "test") if name in stats]


def form_of(stats: dict[str, Any]) -> str:
    """Say in a few words what the rows of a data set are made of."""
    has_form = "form" in raw_forms.form_of(stats["kind"]).settings
    return f"{stats['form']} form" if has_form else f"rows of kind {stats['kind']}"


def explain(reason: str) -> str:
    """Say what a reason for rejecting a row means."""
    return REASONS.get(reason) or PICTURE_REASONS.get(reason.removeprefix("picture_"), "")
