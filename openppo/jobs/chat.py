"""The chat command: a conversation with a model, line by line, over recorded token ids."""

import io
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from openppo import logger
from openppo.agents.renderer import Renderer
from openppo.agents.text_stream import TextStream
from openppo.config import ChatConfig
from openppo.datasets.templates import Message, encode_start, not_empty
from openppo.media import TokenIds
from openppo.models.pretrained import require_text_model
from openppo.rollout.policy import FrozenPolicy
from openppo.rollout.sampling import sampling_params, text_before_stop
from openppo.rollout.seeds import sample_seed
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.weights import WholeWeights
from openppo.tracking.console import escape_control
from openppo.types import Completion, FinishReason, SamplingParams

with suppress(ImportError):  # Python may be built without it
    import readline  # noqa: F401 (input() then has a history and keys for editing)

_COMMANDS = "/reset begins a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."
_NO_TEMPLATE = "the tokenizer has no chat template: each line is continued as plain text, without the lines before."


class Conversation:
    """Turns with the model of ``policy``, whose sampled tokens are never tokenized again.

    Without a chat template each text is continued by itself, and nothing is remembered.
    """

    def __init__(
        self, policy: FrozenPolicy, params: SamplingParams, seed: int, system: str | None = None
    ) -> None:
        self.policy = policy
        self.params = params
        self.seed = seed
        self.renderer = Renderer(policy.tokenizer, "json", policy.eos_token_ids)
        self.is_chat = bool(policy.tokenizer.chat_template)
        self._first: list[Message] = []
        if system is not None:
            self._first = [{"role": "system", "content": system}]
        self.n_turns = 0
        self.last: Completion | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = list(self._first)
        self.token_ids: list[int] = []
        self.recorded: Completion | None = None

    def ask(self, text: str, is_stopped: Callable[[], bool] = bool) -> Iterator[str]:
        """Yield the answer to ``text`` piece by piece, and record the turn; ``is_stopped`` ends it early.

        ``ValueError`` if the template refuses the text, or the model's context is full.
        """
        new: Message = {"role": "user", "content": text}
        prompt_ids = self._prompt(new)
        params = self._limited(len(prompt_ids))
        stream = TextStream(self.renderer.decode, params.stop)

        completion: Completion | None = None
        with closing(self._sample(prompt_ids, params)) as completions:
            for completion in completions:
                if completion.finish_reason is FinishReason.ABORT:
                    yield stream.piece(completion.token_ids)
                    if is_stopped():
                        break
        assert completion is not None, "an engine ends every request"

        answer = text_before_stop(
            self.renderer.text(completion),
            completion.token_ids,
            params,
            decode=self.renderer.decode,
        )
        yield stream.end(answer)
        self.last = completion
        if self.is_chat and completion.token_ids:
            self.recorded = completion
            self.token_ids = [*prompt_ids, *completion.token_ids]
            message, _ = self.renderer.parse(answer, prompt_ids, (), number=self.n_turns)
            self.messages += [new, message]
        self.n_turns += 1

    def _prompt(self, new: Message) -> list[int]:
        """Return the token ids up to where the model answers ``new``; they continue the recorded ones if they can."""
        if not self.is_chat:
            return not_empty(encode_start(self.policy.tokenizer, new["content"]), new["content"])
        if self.recorded is not None:
            added = self.renderer.bridge(self.messages, self.recorded, [new])
            if added is not None:
                return [*self.token_ids, *added]
        return self.renderer.render([*self.messages, new])

    def _limited(self, n_prompt: int) -> SamplingParams:
        """Return the sampling parameters of an answer after ``n_prompt`` tokens."""
        context = self.policy.context
        if context is None:
            return self.params
        left = context - n_prompt
        if left < 1:
            raise ValueError(
                f"the conversation has {n_prompt} tokens, and the model reads {context} at most: /reset begins anew."
            )
        most = min(self.params.max_new_tokens, left)
        least = min(self.params.min_new_tokens, most)
        return replace(self.params, max_new_tokens=most, min_new_tokens=least)

    def _sample(self, prompt_ids: list[int], params: SamplingParams) -> Generator[Completion]:
        """Yield the answer so far after each token, and at last the whole; closing the iterator cancels it."""
        engine = self.policy.engine
        number = engine.submit(
            TokenIds(prompt_ids),
            params,
            seed=sample_seed(self.seed, self.n_turns),
            park=self.is_chat,
            continue_from=None if self.recorded is None else self.recorded.parked,
        )
        try:
            while True:
                engine.step()
                ended = engine.collect()
                if number in ended:
                    yield ended[number]
                    return
                yield engine.partial(number)
        finally:
            engine.cancel(number)


class ChatJob:
    """The command chat: lines of stdin are turns, answers go to stdout, notices to stderr."""

    def __init__(self, options: ChatConfig) -> None:
        """Load the model; ``ValueError`` names the flag to change."""
        self.options = options
        self.strategy = InferenceStrategy(options.bf16, fused_kernels=options.fused_kernels)
        policy = FrozenPolicy(options, "FOLDER")
        require_text_model(policy.pretrain, policy.flag, policy.config)
        if options.system is not None and not policy.tokenizer.chat_template:
            raise ValueError(
                f"--system: the tokenizer of FOLDER {options.folder} has no chat template to write it with. Leave it "
                "out, or give a template with --chat_template."
            )
        policy.load(self.strategy.prepare_frozen, max_batch_size=1)
        self.policy = policy
        self.conversation = Conversation(
            policy, sampling_params(options), seed=options.seed, system=options.system
        )
        self._is_reading = False
        self._is_stopped = False

    def fit(self) -> None:
        """Read lines and answer them until ``/exit`` or the end of the input."""
        # Otherwise the watchdog ends the process upon Ctrl-C.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")

        if not self.conversation.is_chat:
            logger.info(_NO_TEMPLATE)
        if sys.stdin.isatty():
            logger.info(_COMMANDS)
        with self.policy.engine.with_weights(WholeWeights(self.policy.actor.model)):
            for line in self._lines():
                if line == "/exit":
                    break
                if line == "/reset":
                    self.conversation.reset()
                    logger.info("a new conversation begins.")
                elif line:
                    self._answer(line)

    def close(self) -> None:
        """Release the process group."""
        self.strategy.close()

    def _answer(self, line: str) -> None:
        """Write the answer to ``line`` while it is sampled."""
        self._is_stopped = False
        try:
            for piece in self.conversation.ask(line, lambda: self._is_stopped):
                sys.stdout.write(_shown(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
        except ValueError as error:
            logger.warning("%s", error)
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._note_cut()

    def _note_cut(self) -> None:
        """Tell why an answer is not complete."""
        last = self.conversation.last
        if last is not None and last.finish_reason is FinishReason.LENGTH:
            n_tokens = len(last.token_ids)
            reason = "the model's context is full, and /reset begins anew"
            if n_tokens == self.options.generate_max_len:
                reason = "a larger --generate_max_len allows more"
            logger.info("cut after %d tokens: %s.", n_tokens, reason)

    def _interrupt(self, *_: Any) -> None:
        """Stop the answer that is under way, between two tokens; at the prompt, drop the line."""
        if self._is_reading:
            raise KeyboardInterrupt
        self._is_stopped = True

    def _lines(self) -> Iterator[str]:
        """Yield lines of stdin without blanks around them; Ctrl-C drops the line that is being typed."""
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            line = ""
            try:
                self._is_reading = True
                line = input(prompt)
            except EOFError:
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
            finally:
                self._is_reading = False
            yield line.strip()


def _shown(piece: str) -> str:
    """Escape control characters but line breaks and tabs, so that no terminal obeys a model."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: escape_control(match[0]), piece)
