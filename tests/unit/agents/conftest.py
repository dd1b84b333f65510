"""A chat tokenizer of single characters, an engine with a script and a journal, and a sampler over both."""

import string
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from openppo.agents import AgentPlayer
from openppo.config.agents import AgentConfig
from openppo.media import Tokens
from openppo.rollout.driver import EngineDriver
from openppo.rollout.engine import Engine
from openppo.rollout.players import PlayerParts
from openppo.rollout.sampling import decoder, finish_reason
from openppo.types import Completion, FinishReason, SamplingParams, SingleProcess
from tests.playing import Plays

CHATML = """
{%- if tools %}<|im_start|>system
# Tools
You may call functions by <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ (message.content or '').split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Qwen's: tools in Hermes' format; thoughts of earlier turns are cut."""


def make_chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; <pad>, <unk>, <|im_start|> and <|im_end|> (EOS) are special."""
    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(
        WordLevel({t: i for i, t in enumerate([*special, *string.printable])}, unk_token="<unk>")
    )
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHATML, **names)


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """See ``make_chat_tokenizer``."""
    return make_chat_tokenizer()


class ScriptedEngine(Engine):
    """Answers each request with the ids of ``script(text of the prompt)`` and EOS, one token a step.

    ``journal`` holds prompt and sampled ids of every request that ended, ``submitted`` what each was submitted with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Callable[[str], str]) -> None:
        super().__init__(decode=decoder(tokenizer))
        self.tokenizer, self.script = tokenizer, script
        self.journal: list[tuple[list[int], list[int]]] = []
        self.submitted: list[tuple[SamplingParams, int, int | None]] = []
        self.running: dict[int, tuple[list[int], list[int], list[int], SamplingParams]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(
        self,
        prompt: Tokens,
        params: SamplingParams,
        seed: int,
        park: bool = False,
        continue_from: int | None = None,
    ) -> int:
        number, ids = next(self._numbers), list(prompt.token_ids)
        self.submitted.append((params, seed, continue_from))
        answer = self.tokenizer(self.script(self.tokenizer.decode(ids)), add_special_tokens=False)[
            "input_ids"
        ]
        self.running[number] = (ids, [*answer, self.tokenizer.eos_token_id], [], params)
        self.read_tokens += len(ids)
        return number

    def cancel(self, number: int) -> None:
        self.running.pop(number, None)

    def partial(self, number: int) -> Completion:
        sampled = self.running[number][2]
        n = len(sampled)
        return Completion([*sampled], [-0.5] * n, [self.version] * n, FinishReason.ABORT)

    def step(self) -> None:
        for number, (prompt, answer, sampled, params) in list(self.running.items()):
            sampled.append(answer[len(sampled)])
            ends = {self.tokenizer.eos_token_id, *params.stop_token_ids}
            reason = finish_reason(sampled, params, sampled[-1] in ends, self.decode)
            if reason is not None:
                n = len(sampled)
                self._ended[number] = Completion(
                    sampled, [-0.5] * n, [self.version] * n, reason, parked=number
                )
                self.journal.append((prompt, sampled))
                del self.running[number]

    def with_weights(self, weights: Any) -> Any:
        raise NotImplementedError


MakeSampler = Callable[..., Plays]


@pytest.fixture
def make_sampler(chat_tokenizer: PreTrainedTokenizerFast) -> Iterator[MakeSampler]:
    """``make_sampler(agent, script, **options of AgentConfig)``; its engine is ``sampler.engine``.

    ``engine`` is the class of that, ``has_rewards`` tells of sources of rewards beside the agent.
    """
    made: list[Plays] = []

    def make(
        agent: Any,
        script: Callable[[str], str],
        longest: int = 4000,
        engine: Any = ScriptedEngine,
        has_rewards: bool = False,
        **options: Any,
    ) -> Plays:
        source = AgentPlayer(agent, AgentConfig(**options))
        source.check(chat_tokenizer)
        driver = EngineDriver(engine(chat_tokenizer, script))
        parts = PlayerParts(
            driver=driver,
            tokenizer=chat_tokenizer,
            eos_token_ids=[chat_tokenizer.eos_token_id],
            comm=SingleProcess(),
            longest=longest,
            has_rewards=has_rewards,
        )
        made.append(Plays(source.make(parts), driver, source.options.eval_seed))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()
