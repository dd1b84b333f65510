"""A recorded answer of the model."""

from dataclasses import dataclass
from typing import Any

from openppo.agents.parsers import Tools
from openppo.datasets.templates import Message
from openppo.media import Media, distinct_ids
from openppo.types import Completion, FinishReason


@dataclass(eq=False)
class Turn:
    """One answer of the model, with the tokens that were read and sampled.

    ``messages`` are the conversation up to the answer, which is the last, and ``fingerprints`` those of ``tools`` and
    messages. ``parent`` is the turn whose tokens ``prompt_ids`` begin with; None if the conversation was rendered
    whole. ``malformed`` is the error in a tool call. ``media`` are the images of ``prompt_ids``.
    """

    number: int
    messages: list[Message]
    tools: Tools
    prompt_ids: list[int]
    completion: Completion
    text: str
    fingerprints: list[int]
    parent: "Turn | None" = None
    malformed: str | None = None
    media: Media = ()
    reward: float = 0.0
    rewarded: bool = False
    trained: bool = True

    def record_reward(self, reward: float) -> None:
        """Replace the reward of the turn."""
        self.reward = reward
        self.rewarded = True

    def exclude_from_training(self) -> None:
        """Leave out the actions of the turn, until it is included again."""
        self.trained = False

    def include_in_training(self) -> None:
        """Train on the actions of the turn."""
        self.trained = True

    @property
    def message(self) -> Message:
        """The answer in OpenAI's form."""
        return self.messages[-1]

    @property
    def path(self) -> list["Turn"]:
        """The turns whose tokens this one continues, from the first on, and itself."""
        path = [self]
        turn = self.parent
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of this turn."""
        return self.prompt_ids + self.completion.token_ids

    @property
    def read_ids(self) -> list[int]:
        """``token_ids``, different for different images."""
        return distinct_ids(self)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls in OpenAI's form."""
        return list(self.message.get("tool_calls") or [])

    @property
    def finish_reason(self) -> FinishReason:
        """Reason of the completion; ``TOOL_CALL`` if it stopped after calls."""
        reason = self.completion.finish_reason
        if self.tool_calls and reason is FinishReason.STOP:
            return FinishReason.TOOL_CALL
        return reason
