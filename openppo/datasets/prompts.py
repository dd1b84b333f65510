"""Prompts as text and token ids, as generation starts from them."""

from functools import partial

from transformers import PreTrainedTokenizerBase

from openppo.config import RowsConfig
from openppo.datasets.conversation import Render, render_chat, render_open
from openppo.datasets.template_checks import require_answer, require_read
from openppo.datasets.templates import (
    Message,
    Tools,
    as_messages,
    check_tools,
    encode_bare,
    encode_start,
    fill_template,
    not_empty,
    require_texts,
)
from openppo.types import Prompt


def render_prompt(
    value: object,
    tokenizer: PreTrainedTokenizerBase,
    options: RowsConfig,
    tools: Tools | None = None,
) -> Prompt:
    """Render a prompt to text, token ids and chat messages: no EOS after it, one BOS at most.

    ``value`` is a text (put into ``--input_template`` at ``{}``) or, with ``--apply_chat_template``, also a list of
    chat messages, with ``tools``. A turn of the assistant at their end is continued: the prompt ends where its text
    does. Raises ``ValueError`` for any other value, an empty one, one without tokens, or a message that the template
    leaves out.
    """
    if options.apply_chat_template:
        messages = as_messages(value, "user", options.input_template)
        require_texts(messages)
        check_tools(tools, tokenizer)
        text = prompt_text(messages, partial(render_chat, tokenizer=tokenizer, tools=tools))
        ids = encode_bare(tokenizer, text)
        return Prompt(text, not_empty(ids, value), messages=messages)

    text = fill_template(value, options.input_template)
    return Prompt(text, not_empty(encode_start(tokenizer, text), value))


def prompt_text(messages: list[Message], render: Render) -> str:
    """Render ``messages`` up to where the model continues; ``ValueError`` if one of them is left out."""
    if not any(message["content"] or message.get("tool_calls") for message in messages):
        raise ValueError("all chat messages are empty. Remove the row or choose another column.")
    for number, message in enumerate(messages):
        require_answer(message, number)

    text = render_open(messages, render)
    require_read(messages, text, render)
    return text
