"""The data page's HTML: one file that loads nothing and runs nothing. Every value is escaped where it is put in."""

from jinja2 import Environment

from vlmflow.reports.data_style import STYLE

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content-Security-Policy: whatever a text might smuggle in, no script runs and nothing is loaded."""

HEAD = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{{{ title }}}}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>
"""

CHART = """
{% macro chart(chart) %}
<figure class="card chart"><figcaption><h3>{{ chart.title }}</h3>
<span class="soft small">highest column {{ chart.top|share }}</span></figcaption>
<div class="plot" role="img" aria-label="{{ chart.title }}, as columns; the figures stand in the table below">
{% for bin in chart.bins %}
<div class="bin">
{% for name in chart.names %}
<i class="{{ name }}{{ " some" if bin.counts[name] }}" style="height:{{ (bin.shares[name] / chart.top)|css }}"
title="{{ name }}, {{ bin.label }}: {{ bin.counts[name]|n }} ({{ bin.shares[name]|share }})"></i>
{% endfor %}
</div>
{% endfor %}
</div>
<div class="labels{{ " many" if chart.bins|length > 12 }}" aria-hidden="true">
{% for bin in chart.bins %}
<span>{{ bin.label }}</span>
{% endfor %}
</div>
<div class="unit">{{ chart.unit }}</div>
<ul class="key">
{% for name in chart.names %}
<li><i class="{{ name }}"></i>{{ name }}</li>
{% endfor %}
</ul>
<details><summary>Figures</summary><div class="scroll"><table><thead><tr><th>{{ chart.unit }}</th>
{% for name in chart.names %}
<th class="n">{{ name }}</th>
{% endfor %}
</tr></thead><tbody>
{% for label, values in chart.facts %}
<tr><th>{{ label }}</th>
{% for value in values %}
<td class="n">{{ value }}</td>
{% endfor %}
</tr>
{% endfor %}
{% for bin in chart.bins %}
<tr><th>{{ bin.label }}</th>
{% for name in chart.names %}
<td class="n">{{ bin.counts[name]|n }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div></details></figure>
{% endmacro %}
"""

TILES = """<div class="tiles">
{% for label, value, note in tiles %}
<div class="card tile"><span class="soft small">{{ label }}</span>
<b>{{ value }}</b><span class="soft small">{{ note }}</span></div>
{% endfor %}
</div>
"""

MACROS = """
{% macro shot(url, name, half=False) %}
<div class="shot{{ " half" if half }}">
{% if url %}
<img src="{{ url }}" alt="{{ name }}" title="{{ name }}">
{% else %}
<span class="soft small">cannot be shown</span>
{% endif %}
</div>
{% endmacro %}

{% macro counts_of(one) %}
{% for split in splits %}
<td class="n">{{ one.counts.get(split.name, 0)|n }}</td>
{% endfor %}
{% endmacro %}

{% macro heads() %}
{% for split in splits %}
<th class="n">{{ split.name }}</th>
{% endfor %}
{% endmacro %}

{% macro reasons_table(reasons, linked) %}
<div class="card scroll"><table><thead><tr><th>reason</th>{{ heads() }}<th class="bars"></th><th>meaning</th></tr>
</thead><tbody>
{% for reason in reasons %}
<tr><th>
{%- if linked %}<a href="#reason-{{ reason.name }}">{{ reason.name }}</a>{% else %}{{ reason.name }}{% endif -%}
</th>{{ counts_of(reason) }}
<td><div class="bar"><i class="{{ reason.kind }}" style="width:{{ reason.share|css }}"></i></div></td>
<td class="soft">{{ reason.meaning }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
"""

OPENING = """
<header><h1>{{ title }}</h1><p class="soft">{{ subtitle }}</p>
<nav aria-label="Sections"><a href="#lost">Where rows went</a><a href="#like">What rows are like</a>
<a href="#pictures">Pictures</a>
{% if near %}
<a href="#near">Near-duplicates</a>
{% endif %}
<a href="#samples">Samples</a><a href="#rejects">Rejected rows</a></nav></header>
"""

LOST = """
<section id="lost"><h2>Where every row went</h2>
<p class="soft">Rows in = rows kept + rows rejected + rows left out, for each raw split, exactly. Left out is what the
configuration does not ask for; duplicates and leaks (what the test split holds too) are rejected.</p>
<div class="card">
{% for split in splits %}
<h3{{ " class=gap" if loop.index > 1 }}>{{ split.name }}: {{ split.rows_in|n }} rows in, {{ split.kept|n }} kept
({{ (split.kept / (split.rows_in or 1))|share }})</h3>
<div class="track" role="img" aria-label="{{ split.name }}: the parts stand in the list below">
{% for part in split.parts if part.count %}
<i class="{{ part.kind }}" style="flex:{{ part.count }} 1 0" title="{{ part.count|n }} {{ part.label }}"></i>
{% endfor %}
</div>
<ul class="key">
{% for part in split.parts %}
<li><i class="{{ part.kind }}"></i>{{ part.count|n }} {{ part.label }}</li>
{% endfor %}
</ul>
{% endfor %}
</div>
{% if reasons %}
<h3 class="gap">Why rows were rejected</h3>
{{ reasons_table(reasons, True) }}
{% else %}
<p>No row was rejected.</p>
{% endif %}
{% if left_out %}
<h3 class="gap">Why rows were left out</h3>
{{ reasons_table(left_out, False) }}
{% endif %}
{% if unread %}
<h3 class="gap">Keys that nobody reads, and turns dropped</h3>
<p class="soft">In how many of the converted rows; all of them stand in <code>stats.json</code>.</p>
<div class="card scroll"><table><thead><tr><th>what</th>{{ heads() }}</tr></thead><tbody>
{% for one in unread %}
<tr><th>{{ one.name }}</th>{{ counts_of(one) }}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% if sources %}
<h3 class="gap">Rows kept, by source</h3>
<div class="card scroll"><table><thead><tr><th>source</th>{{ heads() }}<th class="bars wide"></th></tr></thead><tbody>
{% for source in sources %}
<tr><th>{{ source.name }}</th>{{ counts_of(source) }}<td><div class="bar">
{% for name, share in source.shares.items() %}
<i class="{{ name }}" style="width:{{ share|css }}" title="{{ name }}: {{ source.counts[name]|n }}"></i>
{% endfor %}
</div></td></tr>
{% endfor %}
</tbody></table>
{% if more_sources %}
<p class="soft small">and {{ more_sources|n }} more</p>
{% endif %}
</div>
{% endif %}
</section>
"""

LIKE = """
<section id="like"><h2>What the rows are like</h2>
<p class="soft">Columns are shares of a file's own rows, so that files of different size can be compared.
How many tokens a row has, a run decides, with its model and picture budget: see
<code>reports/lengths-RUN.html</code>.</p>
<div class="charts">
{% for one in row_charts %}
{{ chart(one) }}
{% endfor %}
</div></section>

<section id="pictures"><h2>Pictures</h2>
{% if pictures %}
<div class="card scroll"><table><thead><tr><th>raw split</th><th class="n">named</th><th class="n">usable</th>
<th>formats</th><th>rewritten as plain RGB</th><th>not usable</th><th>missing, by source</th></tr></thead><tbody>
{% for split in pictures %}
<tr><th>{{ split.name }}</th><td class="n">{{ split.named|n }}</td><td class="n">{{ split.usable|n }}</td>
{% for cell in split.cells %}
<td>
{% for what, count in cell %}
<div>{{ count|n }} <span class="soft">{{ what }}</span></div>
{% else %}
<span class="soft">none</span>
{% endfor %}
</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
<div class="charts">
{% for one in picture_charts %}
{{ chart(one) }}
{% endfor %}
</div>
{% else %}
<p>None was looked at.</p>
{% endif %}
</section>
"""

NEAR = """
{% if near %}
<section id="near"><h2>Near-duplicates of the test split</h2><p class="soft">{{ near.words }}</p>
<div class="pairs">
{% for pair in near.pairs %}
<article class="card sample"><div class="two">
{% for url, name in pair.pictures %}
{{ shot(url, name, True) }}
{% endfor %}
</div>
<div class="small"><div class="head"><span>{{ pair.what }}</span><span>{{ pair.rows }}</span></div>
{% for split, name in pair.names %}
<div><span class="dot {{ split }}"></span><code>{{ name }}</code></div>
{% endfor %}
{% if pair.question %}
<div class="turn" dir="auto"><b>asked in both</b>{{ pair.question }}</div>
{% endif %}
</div></article>
{% endfor %}
</div></section>
{% endif %}
"""

SAMPLES = """
<section id="samples"><h2>Sample conversations</h2>
<p class="soft">Drawn by the rows' identities, from as many sources as possible: the same in every run on the same
data.</p>
<div class="sheet">
{% for sample in samples %}
<article class="card sample">
{% for url, name in sample.pictures %}
{{ shot(url, name) }}
{% endfor %}
<div><div class="head"><span><span class="dot {{ sample.file }}"></span>{{ sample.file }} · {{ sample.source }}</span>
<span>{{ sample.scores }}</span><code>{{ sample.id }}</code></div>
{% for speaker, text, rest in sample.turns %}
<div class="turn{{ " gpt" if speaker == "gpt" }}" dir="auto"><b>{{ speaker }}</b>
{{- text -}}
{% if rest %}
<span class="soft"> … {{ rest|n }} more characters</span>
{%- endif %}
</div>
{% endfor %}
{% if sample.more %}
<p class="soft small">and {{ sample.more }} more turns</p>
{% endif %}
</div></article>
{% endfor %}
</div></section>

<section id="rejects"><h2>Rejected rows</h2>
<p class="soft">The first {{ per_reason }} of every reason, the costliest reason first. All of them, whole, stand in
<code>{{ quarantine }}</code>. Rows are counted from 0; bytes are the row's place in its file.</p>
{% for reason in reasons %}
<div class="card reason" id="reason-{{ reason.name }}"><h3><span class="dot {{ reason.kind }}"></span>{{ reason.name }}
<span class="soft">· {{ reason.total|n }} rows · {{ reason.meaning }}</span></h3>
{% for reject in reason.examples %}
<div class="reject"><div class="head"><span><code>{{ reject.file }}</code>, {{ reject.split }} row {{ reject.row|n }}
{% if reject.file_row != reject.row %} (row {{ reject.file_row|n }} of the file){% endif %}
</span>
{% if reject.start is not none %}
<span>bytes {{ reject.start|n }}–{{ reject.end|n }}</span>
{% endif %}
</div>
<div class="detail" dir="auto">{{ reject.detail }}</div>
<details><summary>the row</summary><div class="text" dir="auto">{{ reject.raw }}</div></details></div>
{% endfor %}
</div>
{% else %}
<p>There are none.</p>
{% endfor %}
</section>
</main></body></html>
"""

ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.filters |= {"n": "{:,}".format, "share": "{:.1%}".format, "css": lambda share: f"{100 * share:.2f}%"}
TEMPLATE = ENVIRONMENT.from_string(HEAD + CHART + MACROS + OPENING + TILES + LOST + LIKE + NEAR + SAMPLES)
