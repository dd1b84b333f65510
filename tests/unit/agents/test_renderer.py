"""From sampled tokens to messages, and from any client's messages to the text that a model reads."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from openppo.agents.build import AgentPlayer
from openppo.agents.renderer import Renderer
from openppo.agents.tool_agent import ToolAgent
from openppo.agents.tools import load_tools
from openppo.build.policy_inputs import load_policy_tokenizer
from openppo.config import RowsConfig
from openppo.config.agents import AgentConfig
from openppo.types import Completion, FinishReason
from tests.unit.agents.real_templates import trl_templates
from tests.unit.agents.test_bridge import TOOLS, byte_tokenizer, with_template

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>'
USER = {"role": "user", "content": "What?"}


@pytest.fixture
def renderer(chat_tokenizer: Any) -> Renderer:
    return Renderer(chat_tokenizer, "hermes", [chat_tokenizer.eos_token_id])


def parsed(renderer: Renderer, text: str, prompt: str = "", tools: Any = TOOLS) -> dict[str, Any]:
    return renderer.parse(text, renderer.encode(prompt), tools, 3)[0]


def test_a_message_that_the_template_skips_is_refused():
    skips = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = with_template(byte_tokenizer(), skips)
    renderer = Renderer(tokenizer, "hermes", [tokenizer.eos_token_id])
    assert renderer.decode(renderer.render([USER])) == "user: What?\n"
    for role in ("observation", "tool"):
        with pytest.raises(
            ValueError, match=f"^the chat template leaves out turn 2, of the role '{role}': 'seen'"
        ):
            renderer.render([USER, {"role": role, "content": "seen"}])


def test_reasoning_is_kept_apart(renderer):
    assert parsed(renderer, "<think>\nhm\n</think>\n\nyes") == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
    }
    opened = parsed(renderer, "hm\n</think>\n\nyes", "<|im_start|>assistant\n<think>\n")
    assert (opened["reasoning_content"], opened["content"]) == ("hm", "yes")
    repeated = parsed(renderer, "<think>hm</think>yes", "<think>\n\n")
    assert (repeated["reasoning_content"], repeated["content"]) == ("hm", "yes")
    assert parsed(renderer, "yes", "<think>\n\n</think>\n\n") == {
        "role": "assistant",
        "content": "yes",
    }


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (f"<think>{CALL}</think>no", ""),
        (f"<think>{CALL}", ""),
        (CALL, "<think>"),
        (f"So: <think>{CALL}</think>", ""),
    ],
)
def test_a_call_in_reasoning_is_no_call(renderer, text, prompt):
    assert "tool_calls" not in parsed(renderer, text, prompt)


def test_unclosed_reasoning_is_all_reasoning(renderer):
    message = parsed(renderer, f"<think>I could {CALL}")
    assert message["content"] == "" and message["reasoning_content"].endswith("</tool_call>")


@pytest.mark.parametrize("text", ["", "  \n", "<|im_start|>", "<pad><|im_end|>"])
def test_empty_answers_and_stray_special_tokens_are_no_text(renderer, text):
    assert parsed(renderer, text) == {"role": "assistant", "content": ""}
    assert parsed(renderer, f"ye{text}s") == {
        "role": "assistant",
        "content": f"ye{text}s" if text.isspace() else "yes",
    }


def test_declared_tags_are_text_of_an_answer_and_structure_is_not(chat_tokenizer):
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<reason>", "</reason>"]}, False)
    renderer = Renderer(tokenizer, "hermes", [tokenizer.eos_token_id])
    text = "<reason>hm</reason>yes"
    assert parsed(renderer, f"{text}<|im_start|>") == {"role": "assistant", "content": text}
    assert (
        renderer.text(Completion(renderer.encode(f"{text}<|im_end|>"), [], [], FinishReason.STOP))
        == text
    )


def test_calls_are_in_the_form_of_clients(renderer):
    message = parsed(renderer, f"I look.\n{CALL}\n{CALL}")
    first, second = message["tool_calls"]
    assert message["content"] == "I look." and parsed(renderer, CALL)["content"] is None
    assert (
        first["function"] == {"name": "find", "arguments": json.dumps({"q": "a"})}
        and first["type"] == "function"
    )
    assert first["id"] != second["id"] and len(first["id"]) == 9


def test_a_call_keeps_the_id_that_the_model_gave_it(chat_tokenizer):
    renderer = Renderer(chat_tokenizer, "mistral", [])
    text = '[TOOL_CALLS] [{"name": "find", "arguments": {}, "id": "%s"}]'
    assert parsed(renderer, text % "abcdefghi")["tool_calls"][0]["id"] == "abcdefghi"
    assert parsed(renderer, text % "short")["tool_calls"][0]["id"] == "c00003000"
    twice = parsed(renderer, text % "abcdefghi" + text % "abcdefghi")["tool_calls"]
    assert [call["id"] for call in twice] == ["c00003000", "c00003001"]


def test_without_tools_nothing_is_a_call(renderer):
    assert parsed(renderer, CALL, tools=[]) == {"role": "assistant", "content": CALL}


def test_a_malformed_call_stays_in_the_text(renderer):
    message, error = renderer.parse("<tool_call>find()</tool_call>", [], TOOLS, 0)
    assert message["content"] == "<tool_call>find()</tool_call>" and "not valid JSON" in str(error)


def test_the_text_of_a_completion_ends_before_its_end(renderer, chat_tokenizer):
    ids = renderer.encode("yes<|im_end|>")
    assert renderer.text(Completion(ids, [], [], FinishReason.STOP)) == "yes"
    assert renderer.text(Completion(ids[:-1], [], [], FinishReason.LENGTH)) == "yes"
    assert (
        renderer.text(Completion(renderer.encode("yes<|im_start|>"), [], [], FinishReason.STOP))
        == "yes"
    )
    assert renderer.text(Completion([], [], [], FinishReason.LENGTH)) == ""


def asked(*forms: Any, **call: Any) -> list[dict[str, Any]]:
    function = {"name": "find", "arguments": '{"q": "a"}'}
    calls = [{"id": "c00000000", "type": "function", "function": function, **call}]
    system, user, assistant, result = forms
    return [
        {"content": "Be short.", **system},
        {"role": "user", "content": "What?", **user},
        {"role": "assistant", "tool_calls": calls, **assistant},
        {"role": "tool", "tool_call_id": "c00000000", "content": "4", **result},
    ]


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3_1", "deepseekv3", "gptoss", "glm4moe", "nemotron_3_nano"]
)
def test_all_forms_of_a_message_are_rendered_alike(name):
    renderer = Renderer(with_template(byte_tokenizer(), trl_templates()[name]), "json", [])
    system = {"role": "system"}
    plain = renderer.rendered(asked(system, {}, {"content": ""}, {}), TOOLS)
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "at?"}]
    assert plain == renderer.rendered(
        asked({"role": "developer"}, {"content": parts}, {"content": None}, {}), TOOLS
    )
    assert plain == renderer.rendered(
        asked(system, {"name": None, "extra": 1}, {}, {}, index=0), TOOLS
    )
    said = {"role": "assistant", "content": "x"}
    assert renderer.rendered([USER, said, USER]) == renderer.rendered(
        [USER, {**said, "tool_calls": None}, USER]
    )
    assert renderer.rendered([USER, said, USER]) == renderer.rendered(
        [USER, {**said, "tool_calls": []}, USER]
    )
    assert "Be short." in plain and "find" in plain and "None" not in plain


def test_arguments_come_out_as_json(assets: Path):
    """Mistral's template writes objects in HTML's escapes, DeepSeek's refuses them."""
    mistral = AutoTokenizer.from_pretrained(assets / "tokenizers" / "mistral-v3")
    deepseek = with_template(byte_tokenizer(), trl_templates()["deepseekv3"])
    for tokenizer in (mistral, deepseek):
        for arguments in ('{"q": "a"}', {"q": "a"}):
            call = {
                "id": "c00000000",
                "type": "function",
                "function": {"name": "find", "arguments": arguments},
            }
            messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
            assert '{"q": "a"}' in Renderer(tokenizer, "json", []).rendered(messages, TOOLS)


WITHOUT_TOOLS = {
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "deepseekv3",
    "gemma",
    "gemma3",
    "idefics3",
    "llama3",
}
WITHOUT_TOOLS |= {"llava_next", "phi3", "phi3_5", "qwen2_5_vl"}


def test_offered_tools_are_in_the_text():
    for name, template in trl_templates().items():
        if name.removesuffix("_training") not in WITHOUT_TOOLS:
            text = Renderer(with_template(byte_tokenizer(), template), "json", []).rendered(
                [USER], TOOLS
            )
            assert all(text.count(word) >= 1 for word in ("find", "fetch", "Look something up.")), (
                name
            )


def tool_source(tmp_path: Path) -> AgentPlayer:
    file = tmp_path / "tools.py"
    file.write_text(
        "from openppo.agents.tools import tool\n\n\n"
        '@tool\ndef find(q: str) -> str:\n    """Find.\n\n    Args:\n        q: words\n    """\n    return q\n'
    )
    options = AgentConfig(tools=str(file))
    return AgentPlayer(ToolAgent(load_tools(str(file)), options), options)


def test_a_template_without_tools_is_refused_before_training(
    tmp_path, assets, caplog, chat_tokenizer
):
    phi3 = AutoTokenizer.from_pretrained(assets / "tokenizers" / "phi3-mini")
    with pytest.raises(ValueError, match="leaves out what tools return"):
        tool_source(tmp_path).check(phi3)
    tool_source(tmp_path).check(chat_tokenizer)
    assert "does not write" not in caplog.text
    tool_source(tmp_path).check(with_template(byte_tokenizer(), trl_templates()["deepseekv3"]))
    assert "does not write tools" in caplog.text


def test_template_arguments_reach_every_rendering(tmp_path, chat_tokenizer):
    template = (
        str(chat_tokenizer.chat_template)
        + "{%- if not enable_thinking %}<think></think>{% endif %}"
    )
    chat_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    texts = {}
    for given in (None, '{"enable_thinking": true}'):
        tokenizer = load_policy_tokenizer(
            str(tmp_path), False, RowsConfig(chat_template_kwargs=given)
        )
        renderer = Renderer(tokenizer, "json", [tokenizer.eos_token_id])
        completion = Completion([tokenizer.eos_token_id], [], [], FinishReason.STOP)
        ids = renderer.bridge([USER, {"role": "assistant", "content": "x"}], completion, [USER])
        texts[given] = renderer.rendered([USER]), renderer.decode(ids or [])
    assert all(text.endswith("<think></think>") for text in texts[None])
    assert all(text.endswith("assistant\n") for text in texts['{"enable_thinking": true}'])
