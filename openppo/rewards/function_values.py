"""Values that a reward function may ask for about a sample, by the names of its parameters."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.row_formats import extra_info
from openppo.datasets.templates import text_of
from openppo.rewards.scoring import answer_text, episode_messages, turn_texts
from openppo.types import Trajectory

Sample = dict[str, Any]
"""What a reward function may ask for about one trajectory, by the names of ``SINGLE_NAMES``.

prompt, response and completion (the response again) are texts, of the response without what ends or pads it; query is
the text of all tokens, those included, as OpenRLHF gives it; row holds the data columns and source is the data set
that it is of; messages is None without a chat template; token_ids are those that the policy sampled. Of an episode,
response is the policy's last message, messages the whole conversation, turns the texts of the policy's messages,
tool_results those of the tools', and tool_rewards their rewards (see ``Episode``), an empty dict without any.

verl's names: data_source is the column, or source in a row without it; solution_str is the response, ground_truth the
label, and extra_info the column, or an empty dict.
"""
_IN_BOTH_FORMS = {
    name: name for name in ("messages", "token_ids", "turns", "tool_results", "tool_rewards")
}
_OF_VERL = {
    **{"data_sources": "data_source", "solution_strs": "solution_str"},
    **{"ground_truths": "ground_truth", "extra_infos": "extra_info"},
}
BATCH_NAMES = {
    **{
        "prompts": "prompt",
        "responses": "response",
        "completions": "completion",
        "labels": "label",
    },
    **{"queries": "query", "rows": "row", "sources": "source", **_IN_BOTH_FORMS, **_OF_VERL},
}
"""Parameter of a function for a batch -> what it gets a list of."""
SINGLE_NAMES = {name: name for name in BATCH_NAMES.values()}
"""The same for a function that is called for each sample."""
VERL_NAMES = {*_OF_VERL, *_OF_VERL.values()}
IN_BOTH_FORMS = {*_IN_BOTH_FORMS, "data_source", "data_sources", "extra_info", "extra_infos"}
"""Parameters that functions of both forms may have, or that are about rows alone."""
BEHIND_COLUMNS = {"source", "sources", "tool_rewards", *VERL_NAMES} - {"data_source", "extra_info"}
"""Parameters that get the column of their name where the data has one; the two left out get it row by row."""


def make_samples(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """One sample per trajectory, decoded with the policy's tokenizer."""
    responses = [answer_text(trajectory, tokenizer) for trajectory in trajectories]
    return [
        {
            "prompt": t.prompt.text,
            "response": response,
            "completion": response,
            "label": t.prompt.label,
            "query": tokenizer.decode(t.token_ids, skip_special_tokens=False),
            "row": t.prompt.row,
            "source": t.prompt.source,
            "data_source": _present(t.prompt.row.get("data_source"), t.prompt.source),
            "solution_str": response,
            "ground_truth": t.prompt.label,
            "extra_info": extra_info(t.prompt.row),
            "messages": t.prompt.messages if t.episode is None else t.episode.messages,
            "token_ids": t.action_ids,
            "turns": turn_texts(t, tokenizer),
            "tool_results": [
                text_of(m.get("content")) for m in episode_messages(t) if m["role"] == "tool"
            ],
            "tool_rewards": {} if t.episode is None else t.episode.tool_rewards,
        }
        for t, response in zip(trajectories, responses, strict=True)
    ]


def _present(value: Any, default: Any) -> Any:
    """``value``, or ``default`` where it is None, which Parquet puts for what is missing."""
    return default if value is None else value
