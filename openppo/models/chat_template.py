"""Chat template of a file, and the arguments of a tokenizer's chat template."""

import re
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from openppo.models.template_limits import require_bounded
from openppo.user_code import TEMPLATE_ERRORS


def read_template(
    file: str, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> str:
    """Read a Jinja template; ``ValueError`` if it cannot be read or compiled, or takes too long."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--chat_template {file}: cannot be read ({error}). Check the path."
        ) from error
    if not text.strip():
        raise ValueError(
            f"--chat_template {file}: the file is empty. Write a Jinja template in it."
        )

    source = f"--chat_template {file}: the template"
    require_bounded(tokenizer, source, text, template_kwargs=template_kwargs)
    messages = [{"role": "user", "content": "a"}]
    try:
        tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"--chat_template {file}, line {error.lineno}: {error.message}. Correct it."
        ) from error
    except TEMPLATE_ERRORS:
        pass  # the template refuses these messages, but may accept those of the data
    return text


def check_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, model: str, template_kwargs: Mapping[str, Any]
) -> None:
    """``ValueError`` for arguments that are reserved, or that the chat template does not use."""
    template = str(tokenizer.chat_template or "")
    parameters = signature(tokenizer.apply_chat_template).parameters
    reserved = {"messages", *parameters} - {"tools", "documents"}
    for argument in template_kwargs:
        is_used = not template or re.search(rf"\b{re.escape(argument)}\b", template)
        if argument in reserved or not is_used:
            raise ValueError(
                f"--chat_template_kwargs: the chat template of {model} does not use {argument!r}. Correct the name, or "
                "leave it out."
            )
