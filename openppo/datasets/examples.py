"""Rows -> prompts of a rollout, examples of the language-model loss, and pairs for the reward model."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RowsConfig, SFTDataConfig, SupervisedConfig
from openppo.config.data import PromptDataConfig
from openppo.datasets.media import RowVision
from openppo.datasets.row_formats import RowFields
from openppo.datasets.row_reader import Keys, RowReader
from openppo.datasets.sources import ShowRows, SourceRow, descend, naming_row, value_of
from openppo.datasets.templates import TokenExample, as_text
from openppo.datasets.turns import all_targets, render_response, render_whole
from openppo.types import Prompt


def load_prompts(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptDataConfig,
    show: ShowRows = iter,
    vision: RowVision | None = None,
) -> list[Prompt]:
    """The prompt of each row, in order; ``options`` drop, cut or refuse those above ``--prompt_max_len`` tokens.

    ``vision`` reads images, which without it are refused.

    The prompt is column ``options.input_key``, else recognized. The label is column ``options.label_key``, else the
    answer of a recognized format, else None. Raises ``ValueError`` naming the data's flag and the row for a missing
    column or an empty or malformed prompt, and ``--prompt_max_len`` if no prompt is left.
    """
    keys = None if options.input_key is None else {"prompt": (options.input_key, "--input_key")}
    reader = RowReader(rows, "prompts", options, keys=keys, also=options.label_key)

    def render(fields: RowFields) -> Prompt:
        return (vision or RowVision(None, (), tokenizer, options=options)).render(fields)

    prompts, n_cut = [], 0
    for row, whole in zip(
        rows, reader.make(render, Prompt, show, tokenizer=tokenizer), strict=True
    ):
        with naming_row(row):
            key = options.label_key
            label = reader.read(row).label if key is None else value_of(row.row, key, "--label_key")
            prompt = fitted_prompt(whole, tokenizer, options)
        n_cut += prompt is not whole
        prompts.append(
            replace(prompt, label=label, row=row.row, source=row.source, index=row.number - 1)
        )
    limit = "--prompt_max_len", options.prompt_max_len
    if n_cut:
        how = options.prompt_truncation
        logger.info(
            "%s: of %d prompts %d were cut to %s %d (%s)",
            rows[0].flag,
            len(rows),
            n_cut,
            *limit,
            how,
        )
    return reader.within(limit, prompts)


def load_tasks(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptDataConfig,
    show: ShowRows = iter,
    vision: RowVision | None = None,
) -> list[Prompt]:
    """Prompts as of ``load_prompts``; rows of no known format become prompts without text, for agents to read."""
    if options.input_key is None:
        try:
            RowReader(rows, "prompts", options)
        except ValueError as error:
            logger.info("%s Its rows are given to the agent as they are.", error)
            label = options.label_key or ""
            return [
                Prompt(
                    "",
                    [],
                    next(iter(descend(row.row, label)), None),
                    row=row.row,
                    messages=None,
                    source=row.source,
                    index=row.number - 1,
                )
                for row in rows
            ]
    return load_prompts(rows, tokenizer, options, show=show, vision=vision)


def fitted_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, options: PromptDataConfig
) -> Prompt:
    """``prompt`` cut to ``--prompt_max_len`` as ``--prompt_truncation`` says; a BOS in front stays, as do messages."""
    ids = prompt.token_ids
    most = options.prompt_max_len
    how = options.prompt_truncation
    if len(ids) <= most or how == "drop":
        return prompt
    if how == "error":
        raise ValueError(
            f"{len(ids)} tokens, above --prompt_max_len {most}: raise it, or use --prompt_truncation drop."
        )
    if prompt.media:
        what = f"{len(ids)} tokens, those of its images included, above --prompt_max_len {most}"
        raise ValueError(
            f"{what}, and images cannot be cut: raise it, or use --prompt_truncation drop."
        )
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
    vision: RowVision | None = None,
) -> list[TokenExample]:
    """One example per row, in order, without those longer than ``supervised.max_len`` tokens.

    Targets are the response and the EOS after it; of a chat, all turns of the assistant, each with what ends it; of a
    row without a response, or with ``data.output_key`` None, all tokens. Of a row with images, which ``vision`` reads,
    the response to its prompt. Raises ``ValueError`` naming ``flag`` and the
    row for a missing column or a malformed value, and ``--max_len`` if no example is left.
    """
    named = (
        data.input_key is not None or data.output_key != SFTDataConfig.output_key
    )  # a default does not count
    column = data.input_key or "input", "--input_key"
    keys: Keys = {"whole": column}
    if data.output_key is not None:
        keys = {"prompt": column, "response": (data.output_key, "--output_key")}
    reader = RowReader(rows, "sft", supervised, keys=keys if named else None)

    def render(fields: RowFields) -> TokenExample:
        return render_text(fields) if vision is None else vision.example(fields, render_text)

    def render_text(fields: RowFields) -> TokenExample:
        if fields.whole is not None:
            return all_targets(
                render_whole(fields.whole, tokenizer, supervised, tools=fields.tools).token_ids
            )
        if fields.conversation is not None and supervised.apply_chat_template:
            return render_whole(fields.conversation, tokenizer, supervised, tools=fields.tools)
        return render_response(
            fields.prompt, fields.response, tokenizer, options=supervised, tools=fields.tools
        )

    return reader.within(
        ("--max_len", supervised.max_len),
        reader.make(render, TokenExample, show, tokenizer=tokenizer),
    )


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
    reader = RowReader(rows, "documents", options, keys=keys)

    def render(fields: RowFields) -> TokenExample:
        text = as_text(fields.whole)
        return all_targets(render_whole(text, tokenizer, options).token_ids if text.strip() else [])

    made = [
        example.token_ids
        for example in reader.make(render, TokenExample, show, tokenizer=tokenizer)
        if example.token_ids
    ]
    examples, n_cut = (
        [all_targets(ids[:max_len]) for ids in made],
        sum(len(ids) > max_len for ids in made),
    )
    if not examples:
        raise ValueError(f"{flag}: every text is empty. Name another column with --pretrain_key.")
    if (n_empty := len(rows) - len(examples)) or n_cut:
        of = len(rows)
        logger.info(
            "%s: of %d documents %d are empty, %d are cut at %d tokens",
            flag,
            of,
            n_empty,
            n_cut,
            max_len,
        )
    return examples
