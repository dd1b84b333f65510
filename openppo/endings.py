"""Reasons for the end of completions, segments and episodes."""

from enum import Enum


class FinishReason(str, Enum):
    """Reason for the end of a completion or segment."""

    STOP = "stop"  # the policy sampled EOS or a stop, which ends the action tokens
    LENGTH = "length"  # the limit on new tokens was reached; no EOS was forced in
    TOOL_CALL = "tool_call"  # the policy ended its turn with a call of a tool
    ABORT = "abort"  # generation was given up

    @property
    def is_complete(self) -> bool:
        """True if the policy ended its last turn itself."""
        return self in (FinishReason.STOP, FinishReason.TOOL_CALL)


class Ending(str, Enum):
    """End of an agent's episode; each has a metric of its own."""

    COMPLETED = "completed"  # the agent returned, or the environment terminated
    MAX_TURNS = "max_turns"  # the model had all its turns
    EPISODE_LENGTH = "episode_length"  # the limit on tokens was reached
    CONTEXT_FULL = "context_full"  # the model's context was full
    ENV_TRUNCATED = "env_truncated"  # the environment cut it off
    TIMEOUT = "timeout"  # it took too long
    AGENT_ERROR = "agent_error"  # the agent raised, left with an error, or nothing gave a reward
    TOOL_ERROR = "tool_error"  # a tool raised when it was created, released or asked for its reward
    CANCELLED = "cancelled"  # its own code cancelled it

    @property
    def is_trained(self) -> bool:
        """True if the episode is trained on; a failure around the policy tells nothing about the policy."""
        return self not in (Ending.TIMEOUT, Ending.AGENT_ERROR, Ending.TOOL_ERROR, Ending.CANCELLED)

    @property
    def is_limit(self) -> bool:
        """True if a limit on turns or tokens ended the episode."""
        return self in (Ending.MAX_TURNS, Ending.EPISODE_LENGTH, Ending.CONTEXT_FULL)
