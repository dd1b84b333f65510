"""Limits of time and memory for the first rendering of a chat template.

A template is a program, and a stranger may have written it.
"""

import os
import resource
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil
from transformers import PreTrainedTokenizerBase

from openppo.user_code import TEMPLATE_ERRORS

_SECONDS = 10
"""CPU time of the renderings."""
_SECONDS_OF_THE_CLOCK = 300
"""Wall-clock time: a lock that another thread held at the fork would never be released."""
_MEMORY_GIB = 1
_OUT_OF_MEMORY = 1
"""Exit status for lack of memory."""

_TEXT = "word " * 100
_SYSTEM = {"role": "system", "content": _TEXT}
_USER = {"role": "user", "content": _TEXT}
_ASSISTANT = {"role": "assistant", "content": _TEXT}
_TURNS: list[dict[str, Any]] = [_USER, _ASSISTANT] * 20

_FUNCTION = {"name": "f", "description": "-", "parameters": {"type": "object"}}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL_ID = "c00000000"
_CALLED_FUNCTION = {"name": "f", "arguments": {"x": "1"}}
_CALL = {"id": _CALL_ID, "type": "function", "function": _CALLED_FUNCTION}
_WITH_TOOLS: list[dict[str, Any]] = [
    _SYSTEM,
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": _TEXT, "tool_call_id": _CALL_ID},
]


def require_bounded(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    template: str | None,
    template_kwargs: Mapping[str, Any],
) -> None:
    """``ValueError`` naming ``source`` if renderings take too much time or memory.

    The rendered chats have one turn, forty turns, and a tool call.
    ``template`` replaces the tokenizer's. Other errors of the template are left to callers with real messages.
    """
    pid = os.fork()
    if pid == 0:
        _render_and_exit(tokenizer, template, template_kwargs)
    _, wait_status = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(wait_status)
    if status == 0:
        return

    reasons = {
        _OUT_OF_MEMORY: f"needs over {_MEMORY_GIB} GiB of memory",
        -signal.SIGXCPU: f"takes over {_SECONDS} s of CPU time",
        -signal.SIGALRM: f"takes over {_SECONDS_OF_THE_CLOCK} s",
    }
    reason = reasons.get(status, f"ended its process with status {status}")
    raise ValueError(
        f"{source} {reason} for a short conversation, and was stopped. Look in it for loops within loops, or use "
        "another template."
    )


def _render_and_exit(
    tokenizer: PreTrainedTokenizerBase, template: str | None, template_kwargs: Mapping[str, Any]
) -> None:
    """Render, and exit with 0 or ``_OUT_OF_MEMORY``; a signal ends the process in time."""
    status = 0
    try:
        _limit_this_process()
        for messages, tools in ((_TURNS[:1], None), (_TURNS, None), (_WITH_TOOLS, [_TOOL])):
            options = {
                **template_kwargs,
                "chat_template": template,
                "tools": tools,
                "add_generation_prompt": True,
            }
            with suppress(*TEMPLATE_ERRORS):
                tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except MemoryError:
        status = _OUT_OF_MEMORY
    finally:
        os._exit(status)  # whatever was raised, none of the parent's code may run here


def _limit_this_process() -> None:
    """Silence the process, and set its limits of time and memory."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)

    for number in (signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(_SECONDS_OF_THE_CLOCK)
    _lower(resource.RLIMIT_CPU, _SECONDS)
    _lower(resource.RLIMIT_CORE, 0)
    memory_in_use = psutil.Process().memory_info().vms
    _lower(resource.RLIMIT_AS, memory_in_use + _MEMORY_GIB * 2**30)


def _lower(kind: int, limit: int) -> None:
    """Set the soft limit, never above the hard one; not every system has each kind."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (limit, hard))
