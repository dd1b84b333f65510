"""Rows -> prompts of a rollout, examples of the language-model loss, and pairs for the reward model."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import PreferenceConfig, RowsConfig, SFTDataConfig, SupervisedConfig
from openppo.config.data import PromptDataConfig
from openppo.datasets.media import Vision, has_images
from openppo.datasets.row_formats import RowFields
from openppo.datasets.row_reader import Keys, RowReader
from openppo.datasets.sources import Row, ShowRows, SourceRow, descend, naming_row, value_of
from openppo.datasets.templates import TokenExample, as_messages, as_text, shortened
from openppo.datasets.turns import all_targets, render_response, render_whole
from openppo.types import Prompt


def load_prompts(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptDataConfig,
    show: ShowRows = iter,
    vision: Vision | None = None,
) -> list[Prompt]:
    """The prompt of each row, in order; ``options`` drop, cut or refuse those above ``--prompt_max_len`` tokens.

    ``vision`` reads images, which without it are refused.

    The prompt is column ``options.input_key``, else recognized. The label is column ``options.label_key``, else the
    answer of a recognized format, else None. Raises ``ValueError`` naming the data's flag and the row for a missing
    column or an empty or malformed prompt, and ``--prompt_max_len`` if no prompt is left.
    """
    keys = None if options.input_key is None else {"prompt": (options.input_key, "--input_key")}
    reader = RowReader(rows, "prompts", options, keys)

    def render(fields: RowFields) -> Prompt:
        return (vision or Vision(None, (), tokenizer, options)).render(fields)

    prompts, n_cut = [], 0
    for row, whole in zip(rows, reader.make(render, Prompt, show, tokenizer), strict=True):
        with naming_row(row):
            key = options.label_key
            label = reader.read(row).label if key is None else value_of(row.row, key, "--label_key")
            prompt = fitted_prompt(whole, tokenizer, options)
        n_cut += prompt is not whole
        prompts.append(replace(prompt, label=label, row=row.row, source=row.source, index=row.number - 1))
    limit = "--prompt_max_len", options.prompt_max_len
    if n_cut:
        how = options.prompt_truncation
        logger.info("%s: of %d prompts %d were cut to %s %d (%s)", rows[0].flag, len(rows), n_cut, *limit, how)
    return reader.within(limit, prompts)


def load_tasks(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptDataConfig,
    show: ShowRows = iter,
    vision: Vision | None = None,
) -> list[Prompt]:
    """Prompts as of ``load_prompts``; rows of no known format become prompts without text, for agents to read."""
    if options.input_key is None:
        try:
            RowReader(rows, "prompts", options)
        except ValueError as error:
            logger.info("%s Its rows are given to the agent as they are.", error)
            label = options.label_key or ""
            return [
                Prompt("", [], next(iter(descend(row.row, label)), None), row.row, None, row.source, row.number - 1)
                for row in rows
            ]
    return load_prompts(rows, tokenizer, options, show, vision)


def fitted_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, options: PromptDataConfig) -> Prompt:
    """``prompt`` cut to ``--prompt_max_len`` as ``--prompt_truncation`` says; a BOS in front stays, as do messages."""
    ids, most, how = prompt.token_ids, options.prompt_max_len, options.prompt_truncation
    if len(ids) <= most or how == "drop":
        return prompt
    if how == "error":
        raise ValueError(
            f"{len(ids)} tokens, above --prompt_max_len {most}: raise it, or use --prompt_truncation drop."
        )
    if prompt.media:
        what = f"{len(ids)} tokens, those of its images included, above --prompt_max_len {most}"
        raise ValueError(f"{what}, and images cannot be cut: raise it, or use --prompt_truncation drop.")
    first = 1 if most > 1 and ids[0] == tokenizer.bos_token_id else 0
    room = most - first
    head = {"left": 0, "right": room, "middle": room // 2}[how]  # as in verl
    ids = [*ids[: first + head], *ids[len(ids) - (room - head) :]]
    return replace(prompt, text=str(tokenizer.decode(ids)), token_ids=ids)


def seed_prompts(n: int) -> list[Prompt]:
    """Prompts without text that stand for seeds of an environment."""
    return [Prompt("", [], index=i) for i in range(n)]


def load_sft_examples(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: SFTDataConfig,
    show: ShowRows = iter,
    vision: Vision | None = None,
) -> list[TokenExample]:
    """One example per row, in order, without those longer than ``supervised.max_len`` tokens.

    Targets are the response and the EOS after it; of a chat, all turns of the assistant, each with what ends it; of a
    row without a response, or with ``data.output_key`` None, all tokens. Of a row with images, which ``vision`` reads,
    the response to its prompt. Raises ``ValueError`` naming ``flag`` and the
    row for a missing column or a malformed value, and ``--max_len`` if no example is left.
    """
    named = data.input_key is not None or data.output_key != SFTDataConfig.output_key  # a default does not count
    column = data.input_key or "input", "--input_key"
    keys: Keys = {"whole": column}
    if data.output_key is not None:
        keys = {"prompt": column, "response": (data.output_key, "--output_key")}
    reader = RowReader(rows, "sft", supervised, keys if named else None)

    def render(fields: RowFields) -> TokenExample:
        if vision is None:
            return render_text(fields)
        return vision.render_response(fields) if has_images(fields) else vision.without_images(render_text(fields))

    def render_text(fields: RowFields) -> TokenExample:
        if fields.whole is not None:
            return all_targets(render_whole(fields.whole, tokenizer, supervised, fields.tools).token_ids)
        if fields.conversation is not None and supervised.apply_chat_template:
            return render_whole(fields.conversation, tokenizer, supervised, fields.tools)
        return render_response(fields.prompt, fields.response, tokenizer, supervised, fields.tools)

    return reader.within(("--max_len", supervised.max_len), reader.make(render, TokenExample, show, tokenizer))


def load_documents(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    key: str | None,
    max_len: int,
    show: ShowRows = iter,
    processes: int = 0,
) -> list[TokenExample]:
    """Documents of ``--pretrain_data`` for the PTX loss: BOS if the tokenizer adds one, text, EOS; all are targets.

    The text is column ``key``, else recognized. A document is cut after ``max_len`` tokens; an empty one is left out.
    Raises ``ValueError`` naming the flag and the row for a missing column or a value that is not text, or if all
    documents are empty.
    """
    flag = "--pretrain_data"
    keys = None if key is None else {"whole": (key, "--pretrain_key")}
    options = RowsConfig(dataset_num_proc=processes)
    reader = RowReader(rows, "documents", options, keys)

    def render(fields: RowFields) -> TokenExample:
        text = as_text(fields.whole)
        return all_targets(render_whole(text, tokenizer, options).token_ids if text.strip() else [])

    made = [example.token_ids for example in reader.make(render, TokenExample, show, tokenizer) if example.token_ids]
    examples, n_cut = [all_targets(ids[:max_len]) for ids in made], sum(len(ids) > max_len for ids in made)
    if not examples:
        raise ValueError(f"{flag}: every text is empty. Name another column with --pretrain_key.")
    if (n_empty := len(rows) - len(examples)) or n_cut:
        of = len(rows)
        logger.info("%s: of %d documents %d are empty, %d are cut at %d tokens", flag, of, n_empty, n_cut, max_len)
    return examples


@dataclass(frozen=True)
class PreferenceExample:
    """Token ids of the better and the worse text, each with its prompt and ending with EOS, and the margin.

    A reward model reads its score at the last token, and a finished response of PPO ends with EOS too.
    """

    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float = 0.0

    @property
    def texts(self) -> list[list[int]]:
        """Token ids of both sides."""
        return [self.chosen_ids, self.rejected_ids]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places in ``texts`` of a better and a worse one."""
        return [(0, 1)]


@dataclass(frozen=True)
class RankingExample:
    """Token ids of several responses to a prompt, as of ``PreferenceExample``, and a score of each."""

    texts: list[list[int]]
    scores: list[float]
    margin = 0.0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places in ``texts`` of a better and a worse one: all pairs with different scores."""
        places = range(len(self.scores))
        return [(i, j) for i in places for j in places if self.scores[i] > self.scores[j]]


def load_preferences(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: PreferenceConfig,
    show: ShowRows = iter,
) -> list[PreferenceExample | RankingExample]:
    """One pair or ranking per row, in order, without those of which a side exceeds ``supervised.max_len`` tokens.

    The sides are responses to the row's prompt, or whole texts where it has none. With
    ``supervised.apply_chat_template`` they may be lists of messages: whole conversations, or the assistant's turns.
    Raises ``ValueError`` naming the data's flag and the row for a missing column, a malformed value, a margin or score
    that is not a number, and ``--max_len`` if nothing is left.
    """
    keys: Keys = {"chosen": (data.chosen_key, "--chosen_key"), "rejected": (data.rejected_key, "--rejected_key")}
    named = [data.chosen_key, data.rejected_key] != [PreferenceConfig.chosen_key, PreferenceConfig.rejected_key]
    if data.responses_key is not None:
        named, keys = True, {"ranked": (data.responses_key, "--responses_key")}
        keys |= {} if data.scores_key is None else {"label": (data.scores_key, "--scores_key")}
    if data.prompt_key is not None:
        named, keys = True, {"prompt": (data.prompt_key, "--prompt_key"), **keys}
    reader = RowReader(rows, "pairs", supervised, keys if named else None)  # a default does not count

    def render(fields: RowFields) -> PreferenceExample | RankingExample:
        if fields.ranked is not None:
            return _ranked(fields, tokenizer, supervised)
        chosen, rejected = (
            _render_side(fields, side, tokenizer, supervised) for side in (fields.chosen, fields.rejected)
        )
        return PreferenceExample(chosen, rejected)

    made = reader.make(
        render, lambda **of: (RankingExample if "texts" in of else PreferenceExample)(**of), show, tokenizer
    )
    examples = []
    for row, example in zip(rows, made, strict=True):
        with naming_row(row):
            _refuse_null_prompt(reader.read(row), row.row, data.prompt_key)
            examples.append(example if data.margin_key is None else _with_margin(example, row.row, data.margin_key))
    return reader.within(("--max_len", supervised.max_len), examples, lambda example: max(map(len, example.texts)))


def _refuse_null_prompt(fields: RowFields, row: Row, key: str | None) -> None:
    """Refuse texts beside a prompt that is null: they are no whole texts."""
    column = next((name for name in (key or "prompt", "prompt", "question") if descend(row, name)), "")
    are_texts = isinstance(fields.chosen, str) or fields.ranked is not None
    if fields.prompt is None and are_texts and descend(row, column) == [None]:
        raise ValueError(f"the prompt in column {column!r} is null. Correct or remove the row.")


def _with_margin(example: PreferenceExample | RankingExample, row: Row, key: str) -> PreferenceExample:
    if isinstance(example, RankingExample):
        raise ValueError("--margin_key is about pairs, and this row is a ranking. Leave the flag out.")
    value = value_of(row, key, "--margin_key")
    return replace(example, margin=_number(value, f"margin in column {key!r}", "drop --margin_key"))


def _ranked(fields: RowFields, tokenizer: PreTrainedTokenizerBase, options: SupervisedConfig) -> RankingExample:
    responses, scores = fields.ranked, fields.label
    if not isinstance(responses, list) or len(responses) < 2:
        raise ValueError(f"not a list of two responses or more: {shortened(responses)}. Correct or remove the row.")
    if scores is None:
        scores = [-place for place in range(len(responses))]
    if not isinstance(scores, list) or len(scores) != len(responses):
        raise ValueError(f"not one score for each of {len(responses)} responses: {shortened(scores)}. Correct the row.")
    texts = [_render_side(fields, response, tokenizer, options) for response in responses]
    example = RankingExample(texts, [_number(score, "score of a response", "remove the row") for score in scores])
    if not example.pairs:
        raise ValueError("no response is better than another. Remove the row.")
    return example


def _render_side(
    fields: RowFields, side: Any, tokenizer: PreTrainedTokenizerBase, options: SupervisedConfig
) -> list[int]:
    prompt = fields.prompt
    if prompt is None and options.input_template is not None:
        raise ValueError("--input_template goes around a prompt: name its column with --prompt_key, or leave it out.")
    if prompt is None:
        return render_whole(side, tokenizer, options, fields.tools).token_ids
    if options.apply_chat_template and not isinstance(side, str) and as_messages(side)[0]["role"] != "assistant":
        raise ValueError("a whole conversation beside a prompt. Leave --prompt_key out.")
    return render_response(prompt, side, tokenizer, options, fields.tools).token_ids


def _number(value: Any, what: str, otherwise: str) -> float:
    with suppress(ValueError, OverflowError):
        if isinstance(value, (int, float, str)) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    raise ValueError(f"the {what} is not a number: {shortened(value)}. Correct it, or {otherwise}.")
