"""What follows a recorded answer is what the chat template writes after it, for real templates and tokenizers."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from openppo.agents.renderer import Renderer
from openppo.datasets.conversation import MARK
from openppo.types import Completion, FinishReason
from tests.unit.agents.real_templates import render, trl_templates

UNSEEN = ["cohere", "lfm2_2_5", "muse_glimmer", "nemotron_3_5_lightning", "qwen3_8"]
"""Looked at only after the bridge was written."""
LAST = "Xq9"
"""Ends the answers, so that their place in a rendering can be found."""
TURN_ENDS = (
    "<|im_end|> <|eot_id|> <|eom_id|> <|end|> <|call|> <|return|> </s> <｜end▁of▁sentence｜> <end_of_turn> <turn|> "
    "<|END_OF_TURN_TOKEN|> <|user|> <|observation|> <|tool_response> <|eot|> <|eom|> <eos>"
).split()
"""Tokens after which a model stops, by the documentation of their models."""
SPECIAL = re.compile(
    r"<[|｜][^<>|｜'\s{}]+[|｜]?>|<[a-z_]+\|>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_\w+>|</?s>"
)

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string"}},
                "required": ["q"],
            },
        },
    }
    for name in ("find", "fetch")
]


def says(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def calls(*names: str, content: str = "", reasoning: str | None = None) -> Message:
    made = [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": name, "arguments": {"q": f"{i} {LAST}"}},
        }
        for i, name in enumerate(names)
    ]
    more = {} if reasoning is None else {"reasoning_content": reasoning}
    return says("assistant", content, tool_calls=made, **more)


def result(i: int, content: str) -> Message:
    return says("tool", content, tool_call_id=f"call0000{i}")


@dataclass(frozen=True)
class Scenario:
    answer: Message
    new: list[Message]
    before: list[Message] = field(default_factory=lambda: [says("user", "What is it?")])
    tools: list[dict[str, Any]] | None = None
    cut: bool = False


ANSWER = says("assistant", f"It is {LAST}")
SYSTEM = says("system", "Be short.")
SCENARIOS = {
    "follow-up": Scenario(ANSWER, [says("user", "And now?")]),
    "two follow-ups": Scenario(ANSWER, [says("user", "And now?"), says("user", "Well?")]),
    "tool result": Scenario(calls("find"), [result(0, "4 apples")], tools=TOOLS),
    "number": Scenario(calls("find"), [result(0, "42")], tools=TOOLS),
    "JSON": Scenario(calls("find"), [result(0, json.dumps({"a": ["b", '"c"']}))], tools=TOOLS),
    "two results": Scenario(
        calls("find", "fetch"), [result(0, "4 apples"), result(1, "none\nat all ")], tools=TOOLS
    ),
    "result, user": Scenario(
        calls("find"), [result(0, "4 apples"), says("user", "Hurry!")], tools=TOOLS
    ),
    "reasoning": Scenario(
        {**ANSWER, "reasoning_content": "Let me see."}, [says("user", " And now? ")]
    ),
    "thought, call": Scenario(
        calls("find", reasoning="Let me see."), [result(0, "4 apples")], tools=TOOLS
    ),
    "text, call": Scenario(calls("find", content="I look."), [result(0, "4 apples")], tools=TOOLS),
    "cut": Scenario(ANSWER, [says("user", "Go on.")], cut=True),
    "system": Scenario(ANSWER, [says("user", "And now?")], [SYSTEM, says("user", "What is it?")]),
    "system, tools": Scenario(
        calls("find"), [result(0, "4")], [SYSTEM, says("user", "What is it?")], TOOLS
    ),
    "tools, no call": Scenario(
        ANSWER, [says("user", "And?")], [SYSTEM, says("user", "What is it?")], TOOLS
    ),
    "later": Scenario(
        calls("fetch"),
        [result(0, "5 pears")],
        [
            says("user", "What?"),
            calls("find"),
            result(0, "none"),
            says("assistant", "None."),
            says("user", "And?"),
        ],
        TOOLS,
    ),
    "again": Scenario(
        calls("fetch"),
        [result(0, "5 ")],
        [says("user", "?"), calls("find"), result(0, "no")],
        TOOLS,
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that token ids say what a text says."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(sorted(letters))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    """``tokenizer`` with a template and the special tokens that it writes."""
    wanted = {*SPECIAL.findall(template), *(end for end in TURN_ENDS if end in template)}
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in sorted(wanted)]
    )
    tokenizer.chat_template = template
    return tokenizer


def whole(tokenizer: PreTrainedTokenizerBase, case: Scenario) -> str | None:
    """The library's rendering of the true conversation; None if the template refuses it.

    Arguments of calls are objects, or texts where the template refuses those or spoils their quotes. Where it leaves
    calls out, the text of the answer tells its place.
    """
    told = {**case.answer, "content": f"{case.answer['content']} {LAST}"}
    for answer in (case.answer, told):
        for as_text in (False, True):
            given = [
                with_arguments(message, as_text) for message in [*case.before, answer, *case.new]
            ]
            more = {"tools": case.tools, "add_generation_prompt": True}
            try:
                text = render(tokenizer, str(tokenizer.chat_template), given, **more)
            except Exception:
                continue
            if LAST in text and "&#34;" not in text:
                return text
    return None


def with_arguments(message: Message, as_text: bool) -> Message:
    if not as_text or "tool_calls" not in message:
        return message
    made = [call["function"] for call in message["tool_calls"]]
    texts = [{**function, "arguments": json.dumps(function["arguments"])} for function in made]
    named = zip(message["tool_calls"], texts, strict=True)
    return {**message, "tool_calls": [{**call, "function": text} for call, text in named]}


def outcome(tokenizer: PreTrainedTokenizerBase, case: Scenario) -> str:
    """How the bridge of a scenario compares with the rendering of the whole conversation."""
    text = whole(tokenizer, case)
    if text is None:
        return "not rendered"
    start = text.rindex(LAST) + len(LAST)
    ends = [(text.index(end, start), end) for end in TURN_ENDS if end in text[start:]]
    if not ends:
        return "without end"
    place, end = min(ends)
    if case.cut:  # all that follows the text
        place, end = min((found.start(), found[0]) for found in SPECIAL.finditer(text, start))
        assert not text[start:place].strip()
    end_id = tokenizer.convert_tokens_to_ids(end)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    n_ends = tokenizer(text[: place + len(end)], add_special_tokens=False)["input_ids"].count(
        end_id
    )
    at = [i for i, token_id in enumerate(ids) if token_id == end_id][n_ends - 1]
    sampled = tokenizer("sampled", add_special_tokens=False)["input_ids"]
    reason = FinishReason.LENGTH if case.cut else FinishReason.STOP
    completion = Completion(sampled if case.cut else [*sampled, end_id], [], [], reason)
    written = [token for token in TURN_ENDS if token in str(tokenizer.chat_template)]
    eos = tokenizer.convert_tokens_to_ids([*written, tokenizer.eos_token])
    bridge = Renderer(tokenizer, "json", eos).bridge(
        [*case.before, case.answer], completion, case.new, case.tools or ()
    )
    if bridge is None:
        return "refused"
    return "exact" if bridge == ids[at if case.cut else at + 1 :] else "wrong"


def outcomes(tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, str]:
    """By scenario."""
    tokenizer = with_template(tokenizer, template)
    return {name: outcome(tokenizer, case) for name, case in SCENARIOS.items()}


def check_matrix(tokenizer: PreTrainedTokenizerBase) -> None:
    """Nothing is wrong, and 85 % of what the templates render are exact; run with -rP to see the table."""
    table = {
        name: outcomes(tokenizer, template) for name, template in sorted(trl_templates().items())
    }
    for name, row in table.items():
        others = {case: what for case, what in row.items() if what != "exact"}
        print(f"{name:40}{Counter(row.values())['exact']:3} of {len(row)} exact; {others}")
    counts = Counter(what for row in table.values() for what in row.values())
    print(counts)
    assert counts["wrong"] == counts["without end"] == 0
    assert (
        counts["exact"] >= 0.85 * (sum(counts.values()) - counts["not rendered"])
        and counts["exact"] >= 790
    )
    assert {what for name in UNSEEN for what in table[name].values()} <= {"exact", "not rendered"}


def test_bridges_of_many_templates_are_exact():
    check_matrix(byte_tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5", "mistral-v3", "phi3-mini", "gpt2"])
def test_bridges_are_exact_in_real_tokens(assets: Path, name):
    check_matrix(AutoTokenizer.from_pretrained(assets / "tokenizers" / name))


@pytest.mark.parametrize(
    ("name", "outcomes_of"),
    [
        ("qwen2.5", {"exact": 16}),
        ("mistral-v3", {"exact": 15, "not rendered": 1}),  # refuses text and call in one answer
        ("phi3-mini", {"exact": 6, "refused": 10}),  # writes no results of tools
    ],
)
def test_bridges_of_real_tokenizers_are_exact(assets: Path, name, outcomes_of):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    assert Counter(outcomes(tokenizer, str(tokenizer.chat_template)).values()) == outcomes_of


PIECES = [
    "",
    " ",
    "42",
    "4.0",
    "\n",
    "a\n\n b ",
    MARK,
    "<|im_end|>",
    "</s>",
    "<|eot_id|>",
    "<|user|>",
    "<|end|>",
    "<think>",
]
PIECES += [
    "</think>x",
    '{"a": 1}',
    "\u00e9\u4e2d\U0001f600",
    "'\"\\",
    "&<>",
    "[INST]",
    "null",
    "<|im_start|>assistant\n",
]


def test_nothing_is_wrong_whatever_messages_say():
    draw = random.Random(0)

    def altered(messages: list[Message]) -> list[Message]:
        texts = ["".join(draw.choice(PIECES) for _ in range(draw.randint(0, 3))) for _ in messages]
        roles = ("user", "tool")
        return [
            {**m, "content": text} if m["role"] in roles else m
            for m, text in zip(messages, texts, strict=True)
        ]

    counts: Counter[str] = Counter()
    for name, template in sorted(trl_templates().items()):
        if not name.endswith("_training"):
            tokenizer = with_template(byte_tokenizer(), template)
            for case in draw.sample(list(SCENARIOS.values()), 12):
                counts[
                    outcome(
                        tokenizer, replace(case, new=altered(case.new), before=altered(case.before))
                    )
                ] += 1
    assert counts["wrong"] == 0 and counts["exact"] > 250


def test_sampled_tokens_stay_as_they_were_sampled(assets: Path):
    """Letter by letter, as no tokenizer would have them, over four turns."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / "qwen2.5")
    renderer = Renderer(tokenizer, "hermes", [tokenizer.eos_token_id])
    messages = [SYSTEM, says("user", "What is it?")]
    ids = renderer.render(messages, TOOLS)
    for i in range(4):
        said = f'Let me look.\n<tool_call>\n{{"name": "find", "arguments": {{"q": "apples {i}"}}}}\n</tool_call>'
        sampled = [token_id for letter in said for token_id in renderer.encode(letter)] + [
            tokenizer.eos_token_id
        ]
        answer, _ = renderer.parse(said, ids, TOOLS, i)
        new = [says("tool", f"{i} apples", tool_call_id=answer["tool_calls"][0]["id"])]
        bridged = renderer.bridge(
            [*messages, answer], Completion(sampled, [], [], FinishReason.STOP), new, TOOLS
        )
        assert bridged is not None
        ids, messages = ids + sampled + bridged, [*messages, answer, *new]
    assert renderer.decode(ids) == renderer.rendered(messages, TOOLS)
    assert len(ids) > len(renderer.render(messages, TOOLS)) + 4 * 30


def bridge(
    tokenizer: PreTrainedTokenizerBase, case: Scenario, end: str | None, before: Any = None
) -> str | None:
    """Text that follows a sampled answer that ``end`` ended."""
    eos = tokenizer.convert_tokens_to_ids(
        [token for token in TURN_ENDS if token in str(tokenizer.chat_template)]
    )
    sampled = [5] if end is None else [5, tokenizer.convert_tokens_to_ids(end)]
    completion = Completion(sampled, [], [], FinishReason.STOP)
    renderer = Renderer(tokenizer, "json", [*eos, tokenizer.eos_token_id])
    ids = renderer.bridge(
        [*(before or case.before), case.answer], completion, case.new, case.tools or ()
    )
    return None if ids is None else renderer.decode(ids)


def test_an_end_that_the_template_does_not_write_is_refused():
    templates = trl_templates()
    glm = with_template(byte_tokenizer(), templates["glm4moe"])
    assert bridge(glm, SCENARIOS["tool result"], "<|observation|>") == (
        "\n<tool_response>\n4 apples\n</tool_response><|assistant|>"
    )
    assert bridge(glm, SCENARIOS["tool result"], "<|user|>") is None
    assert bridge(glm, SCENARIOS["follow-up"], "<|observation|>") is None
    llama = with_template(byte_tokenizer(), templates["llama3_1"])
    assert bridge(llama, SCENARIOS["tool result"], "<|eot_id|>") is not None
    assert bridge(llama, SCENARIOS["tool result"], "<|eom_id|>") is None
    gpt = with_template(byte_tokenizer(), templates["gptoss"])
    assert (
        bridge(gpt, SCENARIOS["follow-up"], "<|return|>") is None
    )  # the template has <|end|> in its place


def test_what_came_before_decides_what_follows():
    """The control of the matrix: with another history its templates write something else."""
    deepseek = with_template(byte_tokenizer(), trl_templates()["deepseekv3"])
    case, end = SCENARIOS["again"], "<｜end▁of▁sentence｜>"
    assert bridge(deepseek, case, end) != bridge(deepseek, case, end, before=[says("user", "-")])


def test_a_turn_that_the_template_refuses_can_be_continued(assets: Path):
    """Whole, these conversations cannot be rendered."""
    llama = with_template(byte_tokenizer(), trl_templates()["llama3_1"])
    two = bridge(llama, SCENARIOS["two results"], "<|eot_id|>")
    assert two is not None and two.index("4 apples") < two.index("none")
    mistral = AutoTokenizer.from_pretrained(assets / "tokenizers" / "mistral-v3")
    assert bridge(mistral, SCENARIOS["text, call"], "</s>") == (
        '[TOOL_RESULTS] {"content": "4 apples", "call_id": "call00000"}[/TOOL_RESULTS]'
    )


def test_an_answer_that_was_cut_gets_the_end_of_a_turn(chat_tokenizer):
    answer = bridge(chat_tokenizer, SCENARIOS["cut"], None)
    assert answer == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert bridge(chat_tokenizer, SCENARIOS["cut"], "<|im_end|>") == answer.removeprefix(
        "<|im_end|>"
    )
