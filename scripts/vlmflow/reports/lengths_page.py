"""The lengths page: one HTML file that says how many tokens a run's rows have, and which max_length they need."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.core.files import read_json
from vlmflow.reports.chart import chart
from vlmflow.reports.data_template import CHART, ENVIRONMENT, HEAD, TILES
from vlmflow.reports.histogram import Histogram, wide_bins
from vlmflow.rows.data_rows import lines_of

OPENING = """
<header><h1>{{ title }}</h1><p class="soft">{{ subtitle }}</p></header>
"""

BODY = """<section><h2>Tokens</h2>
<p class="soft">Columns are shares of a file's own rows.</p>
<div class="charts">
{% for one in charts %}
{{ chart(one) }}
{% endfor %}
</div></section>
<section><h2>The longest rows</h2>
<p class="soft">The smoke run trains on the longest of those that fit.</p>
<div class="card scroll"><table><thead><tr><th>file</th><th>row</th><th class="n">tokens</th>
<th class="n">of them pictures</th></tr></thead><tbody>
{% for split, row in longest %}
<tr><td><span class="dot {{ split }}"></span>{{ split }}</td><td><code>{{ row.id }}</code></td>
<td class="n">{{ row.tokens|n }}</td><td class="n">{{ row.picture_tokens|n }}</td></tr>
{% endfor %}
</tbody></table></div></section>
</main></body></html>
"""

TEMPLATE = ENVIRONMENT.from_string(HEAD + CHART + OPENING + TILES + BODY)


class Length(msgspec.Struct):
    """What the page reads of a line of `lengths/RUN/SPLIT.jsonl`."""

    text_tokens: int
    picture_tokens: int


class Tokens:
    """The tokens of one data file's rows. over_long: how many rows have more than `max_length`."""

    def __init__(self, lengths: Path, max_length: int) -> None:
        self.all, self.text, self.pictures = Histogram(), Histogram(), Histogram()
        self.over_long = 0
        for row in lines_of(lengths, Length):
            tokens = row.text_tokens + row.picture_tokens
            self.all.add(tokens)
            self.text.add(row.text_tokens)
            self.over_long += tokens > max_length
            if row.picture_tokens:
                self.pictures.add(row.picture_tokens)


def lengths_page(run: str, lengths: Mapping[str, Path], summary: Path, max_length: int) -> str:
    """Give the page. lengths: the lengths file of train and of val. max_length: the run's own (train.max_length).

    Raises VlmflowError where a file holds a damaged line.
    """
    account = read_json(summary)
    splits = {split: Tokens(file, max_length) for split, file in lengths.items()}
    charts = [
        _chart("Tokens of a row", "tokens, text and pictures", {name: one.all for name, one in splits.items()}),
        _chart("Text of a row", "tokens, chat marks included", {name: one.text for name, one in splits.items()}),
        _chart("Pictures of a row", "tokens, of rows with a picture", {n: one.pictures for n, one in splits.items()}),
    ]
    compared = account["compared_with_ms_swift"]
    return TEMPLATE.render(
        title=f"{run}: the lengths of its rows",
        subtitle=f"Counted for the run's model with train.image_max_tokens = {account['image_max_tokens']}; "
        f"{compared} rows compared with ms-swift's own encoding, without a difference.",
        tiles=_tiles(account, splits, max_length),
        charts=[one for one in charts if one["names"]],
        longest=[(split, row) for split in splits for row in account[split]["longest"]],
    )


def _chart(title: str, unit: str, series: dict[str, Histogram]) -> dict[str, Any]:
    return chart(title, unit, series, wide_bins(series))


def _tiles(account: dict[str, Any], splits: dict[str, Tokens], max_length: int) -> list[tuple[str, str, str]]:
    train, advice = account["train"], account["max_length"]
    most, all_rows = advice["covers_99.9_percent"], advice["covers_all"]
    above = "; longer rows need over_long: leave_out or shorten" if most < all_rows else ""
    over_long = sum(one.over_long for one in splits.values())
    rows = sum(one.all.count for one in splits.values())
    return [
        ("rows to train on", f"{train['rows']:,}", f"{train['tokens']:,} tokens"),
        ("picture tokens", f"{train['picture_tokens'] / train['tokens']:.0%}", "of the tokens of train"),
        ("train.max_length", f"{max_length:,}", f"{over_long:,} of {rows:,} rows are longer"),
        ("99.9 % of rows fit", f"{most:,}", f"recommended max_length{above}"),
        ("all rows fit", f"{all_rows:,}", "max_length"),
    ]
