"""ms-swift's own template of a model, as the trainers make it, and what is changed in ms-swift 4.6 for it.

- No Python from a model's folder runs, whoever asks for it. ms-swift passes trust_remote_code=True whenever it loads a
  model (swift/model/register.py, model_meta.py, and the loaders of some models). transformers then imports modules that
  a JSON file names (`auto_map`), and `custom_generate/generate.py` if the folder has it. The folders that stages see
  have no Python; this is a second safeguard.
- Models that are built like GPT-2 are loaded and adapted. ms-swift sets a model's `hidden_size` to null where its
  config.json has another name for it (`compat_zero3`, utils/hf_config.py), and does not count their layers,
  transformers' `Conv1D`, among the linear ones.
- Processors get all picture limits of a run. ms-swift reads IMAGE_MAX_TOKEN_NUM for Qwen-VL alone, and leaves all other
  pictures to the processor.
- Templates that write today's date write one date for all days: that of the model's own chat template. ms-swift writes
  today's date into some templates when it is imported (templates/llama.py, mistral.py), and into rows as it encodes
  them (templates/llm.py), so a training that resumes tomorrow would go on with other tokens, and no digest would tell.
  The models' own chat templates take today's date too, but many have one of their own for programs that give none
  (Llama 3.2: 26 Jul 2024).
- Of files of rows only the columns that are trained on are read, each with its type. ms-swift lets `datasets` guess all
  columns and their types from the first 10 MB of a file (packaged_modules/json): a text that looks like a date there is
  a time, and the load ends at a later text that does not; or at a column that is empty there, and filled later.
- Rows are encoded as servers give them to a model, and trained as the run says. The agent template for Qwen
  (agent_template/hermes.py) begins a system prompt with two line feeds where there are only tools, and puts none
  between a text and the calls behind it. It drops nulls of declarations: what Arrow adds, but ours are JSON texts until
  then. And an answer whose `loss` is true is trained although only last answers are to be.
"""

import os
import sys
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from vlmflow.core.account import read_lines
from vlmflow.core.files import sha256_of
from vlmflow.fetch.chat_templates import OTHERWISE, WRITTEN, date_in
from vlmflow.pictures.budget import PictureBudget
from vlmflow.rows.sharegpt import has_tools
from vlmflow.swift.child_process import IMAGE_MAX_TOKENS

HELD_IN = ("prefix", "system_prefix", "prompt", "chat_sep", "suffix", "default_system")
"""The parts of a template (swift.template.TemplateMeta): texts, and lists of texts."""

AGENT_TEMPLATE = "hermes"
"""The name of ms-swift's template for Qwen's tools; rows without tools do not use it."""


def refuse_remote_code() -> None:
    """Make every loader of transformers use trust_remote_code=False, whatever it is called with."""
    import transformers
    from transformers.models.auto import modeling_auto

    others = [
        getattr(transformers, f"Auto{kind}")
        for kind in ("Config", "FeatureExtractor", "ImageProcessor", "Processor", "Tokenizer", "VideoProcessor")
    ]
    # Each automatic class of models has its own copy of the two functions (auto_factory.auto_class_update).
    models = [kind for kind in vars(modeling_auto).values() if isinstance(kind, type)]
    for loader in [*others, *models, transformers.PreTrainedModel]:
        for name in ("from_pretrained", "from_config"):
            if name in vars(loader):
                setattr(loader, name, classmethod(_untrusting(vars(loader)[name].__func__)))


def _untrusting(load: Callable[..., Any]) -> Callable[..., Any]:
    def untrusting(*arguments: Any, **settings: Any) -> Any:
        return load(*arguments, **settings | {"trust_remote_code": False})

    return untrusting


def take_conv1d_for_linear() -> None:
    """Change ms-swift in this process; other models are loaded and adapted as before."""
    from swift.pipelines.train import tuner
    from swift.utils import HfConfigFactory, find_all_linears
    from transformers.pytorch_utils import Conv1D

    plain = HfConfigFactory.compat_zero3

    def keep_size(config: Any) -> None:
        if HfConfigFactory.get_config_attr(config, "hidden_size") is not None:
            plain(config)

    HfConfigFactory.compat_zero3 = staticmethod(keep_size)
    tuner.find_all_linears = partial(find_all_linears, extra_layers=[Conv1D])


def limit_pictures() -> None:
    """Let the processors of all templates that ms-swift makes from now on and in this process have the run's limits.

    They are those that are published (`merging.proof`).
    """

    def limit(template: Any, processor: Any) -> None:
        if most_tokens := os.environ.get(IMAGE_MAX_TOKENS):  # `make_swift_names` writes only texts
            budget = PictureBudget.of(Path(processor.model_info.model_dir), int(most_tokens))
            for key, value in budget.left_to_processor.items():
                setattr(processor.image_processor, key, value)

    _with_each_template(limit)


def _with_each_template(change: Callable[[Any, Any], None]) -> None:
    """Change each template that ms-swift makes from now on and in this process. change: takes it and its processor."""
    from swift.template.base import Template

    plain = Template.__init__

    def make(template: Any, processor: Any, *values: Any, **named: Any) -> None:
        plain(template, processor, *values, **named)
        change(template, processor)

    Template.__init__ = make


def hold_one_date() -> None:
    """Let all templates that ms-swift makes from now on and in this process write the date of their model."""
    day = datetime.now()
    days = [day - timedelta(days=1), day, day + timedelta(days=1)]  # ms-swift's import may be before midnight

    def hold(template: Any, processor: Any) -> None:
        own = str(getattr(processor, "chat_template", None) or "")
        held = date_in(own, alone=True) or date_in(own, alone=False) or OTHERWISE
        for part in HELD_IN:
            text = getattr(template.template_meta, part)
            for how in WRITTEN:
                text = _dated(text, [day.strftime(how) for day in days], held.strftime(how))
            setattr(template.template_meta, part, text)
        _show_clocks(held)

    _with_each_template(hold)


def _dated(text: Any, today: list[str], held: str) -> Any:
    if isinstance(text, list):
        return [_dated(each, today, held) for each in text]
    if isinstance(text, str):
        for each in today:
            text = text.replace(each, held)
    return text


def clock_at(at: datetime) -> type[datetime]:
    """Return a clock that stands still, in place of the class `datetime`."""

    class StandingClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(at.year, at.month, at.day, at.hour, at.minute, tzinfo=tz)

        @classmethod
        def today(cls) -> Self:
            return cls.now()

    return StandingClock


def _show_clocks(day: date) -> None:
    """Let the modules of ms-swift's templates read a day from their clock."""
    clock = clock_at(datetime.combine(day, time()))
    for name, module in list(sys.modules.items()):
        if name.startswith("swift.template.") and isinstance(vars(module).get("datetime"), type):
            module.datetime = clock  # type: ignore[attr-defined]


class _Row(msgspec.Struct):
    """What is trained of a row (`rows/sharegpt`). Turns and tools stay JSON, for ms-swift: keys differ."""

    conversations: msgspec.Raw
    images: list[str] = []
    tools: str | None = None


def read_rows_by_type() -> None:
    """Make ms-swift read each file in this process as JSON lines of rows."""
    from swift.dataset import loader

    loader.hf_load_dataset = _load_rows


def _load_rows(kind: str, *, data_files: str, cache_dir: str, **others: Any) -> Any:
    """Take the place of `datasets.load_dataset` in ms-swift's loader.

    The rows are Arrow in `cache_dir`, under the file's digest, for all processes of this machine.
    """
    from datasets import Dataset, Features, List, Value

    columns = {"conversations": Value("string"), "images": List(Value("string"))}
    with open(data_files, "rb") as lines:
        tools = any(map(has_tools, lines))
    features = Features(columns | ({"tools": Value("string")} if tools else {}))
    digest = sha256_of(Path(data_files))
    given = {"file": data_files, "tools": tools}
    return Dataset.from_generator(_rows, features, cache_dir, gen_kwargs=given, fingerprint=digest)


def _rows(file: str, tools: bool = False) -> Iterator[dict[str, Any]]:
    for row in read_lines(Path(file), _Row):
        columns = {"conversations": bytes(row.conversations).decode(), "images": row.images}
        yield columns | {"tools": row.tools} if tools else columns


def encode_rows_as_served() -> None:
    """Change ms-swift in this process; rows without tools and without `loss` are encoded as before."""
    from swift.agent_template import agent_template_map
    from swift.agent_template.hermes import HermesAgentTemplate
    from swift.dataset.preprocessor import core
    from swift.loss_scale import LossScale
    from swift.template import base

    class AsServed(HermesAgentTemplate):
        def _format_tools(self, tools: list[Any], system: str | None = None, user_message: Any = None) -> str:
            text: str = super()._format_tools(tools, system, user_message)
            return text if system else text.removeprefix("\n\n")

        def _add_tool_call_prefix(self, tool_content: str, pre_message: dict[str, Any] | None = None) -> str:
            # The line feed is of the text's message: behind a text that is not trained, it would be another token.
            if pre_message and pre_message["role"] == "assistant":
                pre_message["content"] += "\n"
            return tool_content

    cut, weighed = base.Template._remove_history_thinking, LossScale._inner_call

    def cut_thoughts(template: Any, inputs: Any) -> None:
        cut(template, inputs)  # it strips texts
        for message in inputs.messages:
            if isinstance(message["content"], list) and not message["content"][0].endswith("\n"):
                message["content"][0] += "\n"

    def weigh_last_alone(scale: Any, context: Any, kind: Any, query: Any, loss: Any, weight: Any, is_last: bool) -> Any:
        only_others = scale.base_strategy == "last_round" and not is_last
        return weighed(scale, context, kind, query, False if only_others else loss, weight, is_last)

    base.Template._remove_history_thinking = cut_thoughts
    LossScale._inner_call = weigh_last_alone
    agent_template_map[AGENT_TEMPLATE] = AsServed
    core.remove_arrow_padding = base.remove_arrow_padding = lambda declaration: declaration


def encode_as_in_training() -> None:
    """Let ms-swift read and encode rows as all of our processes do, from now on and in this process."""
    refuse_remote_code()
    read_rows_by_type()
    encode_rows_as_served()
    hold_one_date()
    limit_pictures()
    take_conv1d_for_linear()


def own_template(words: list[str]) -> Any:
    """Return the template of ms-swift's arguments of model and template, set to training.

    words: a command line. See `encode_as_in_training`. Ends the process if ms-swift does not know an argument.
    """
    encode_as_in_training()
    from swift.arguments import BaseArguments
    from swift.utils import parse_args

    arguments, unknown = parse_args(BaseArguments, words)
    if unknown:
        sys.exit(f"ValueError: unknown arguments: {unknown}")
    template = arguments.get_template()
    template.set_mode("train")
    return template
