"""Makes ms-swift encode rows as servers give them to a model, and train what was asked for.

Its agent template for Qwen (4.6, agent_template/hermes.py) begins a system prompt with two line feeds where there are
only tools, and puts none between a text and the calls behind it. It drops nulls of declarations: what Arrow adds, but
ours are JSON texts until then. And an answer whose `loss` is true is trained although only last answers are to be.
"""

from typing import Any

AGENT_TEMPLATE = "hermes"
"""The name of ms-swift's template for Qwen's tools; rows without tools do not use it."""


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
    core.remove_arrow_padding = base.remove_arrow_padding = _unchanged


def _unchanged(declaration: Any) -> Any:
    return declaration
