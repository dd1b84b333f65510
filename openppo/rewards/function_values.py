"""Values of a sample for reward functions, by the names of their parameters."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.row_formats import extra_info
from openppo.rewards.scoring import answer_text, role_texts, turn_texts
from openppo.types import Sample

Values = dict[str, Any]
"""Values of one sample for a reward function, by the names of ``SINGLE_NAMES``.

prompt, response and completion (the response again) are texts, the response without tokens that end or pad it; query is
the text of all tokens, as in OpenRLHF; row holds the data columns and source is their data set; messages is None
without a chat template; token_ids are those that the policy sampled. For an episode, response is the policy's last
message, messages the whole conversation, turns the texts of the policy's messages, tool_results the texts of the
tools' messages, and tool_rewards the tools' rewards (see ``Episode``), an empty dict if there are none.

verl's names: data_source is the column, or source in a row without it; solution_str is the response, ground_truth the
label, and extra_info the column, or an empty dict.
"""
_IN_BOTH_FORMS = {
    name: name for name in ("messages", "token_ids", "turns", "tool_results", "tool_rewards")
}
_VERL = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
BATCH_NAMES = {
    "prompts": "prompt",
    "responses": "response",
    "completions": "completion",
    "labels": "label",
    "queries": "query",
    "rows": "row",
    "sources": "source",
    **_IN_BOTH_FORMS,
    **_VERL,
}
"""Parameter of a function for a batch -> name of the value of which it gets a list."""
SINGLE_NAMES = {name: name for name in BATCH_NAMES.values()}
"""Parameter of a function for a single sample -> name of its value."""
VERL_NAMES = {*_VERL, *_VERL.values()}
"""Parameters of verl's functions."""
IN_BOTH_FORMS = {*_IN_BOTH_FORMS, "data_source", "data_sources", "extra_info", "extra_infos"}
"""Parameters that functions of both forms may have, or that are about rows alone."""
BEHIND_COLUMNS = {"source", "sources", "tool_rewards", *VERL_NAMES} - {"data_source", "extra_info"}
"""Parameters that get the column of their name if the data has one.

The two names left out get that column row by row.
"""


def values_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Values:
    """Values of a sample, decoded with the policy's tokenizer."""
    prompt = sample.prompt
    episode = sample.episode
    response = answer_text(sample, tokenizer)
    data_source = prompt.row.get("data_source")
    return {
        "prompt": prompt.text,
        "response": response,
        "completion": response,
        "label": prompt.label,
        "query": tokenizer.decode(sample.last.token_ids, skip_special_tokens=False),
        "row": prompt.row,
        "source": prompt.source,
        # Parquet writes None for a missing value.
        "data_source": prompt.source if data_source is None else data_source,
        "solution_str": response,
        "ground_truth": prompt.label,
        "extra_info": extra_info(prompt.row),
        "messages": prompt.messages if episode is None else episode.messages,
        "token_ids": sample.last.action_ids,
        "turns": turn_texts(sample, tokenizer),
        "tool_results": role_texts(sample, "tool"),
        "tool_rewards": {} if episode is None else episode.tool_rewards,
    }
