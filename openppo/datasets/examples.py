"""Rows -> prompts of a rollout, and examples of the language-model loss."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RowsConfig, SFTDataConfig, SupervisedConfig
from openppo.config.data import PromptDataConfig
from openppo.datasets.media import RowVision
from openppo.datasets.row_fields import RowFields
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
    """Load the prompt of each row, in order.

    ``options`` drop, cut or refuse prompts above ``--prompt_max_len`` tokens. ``vision`` reads images, which are
    refused without it.

    The prompt is column ``options.input_key``, else recognized. The label is column ``options.label_key``, else the
    answer of a recognized format, else None. Raises ``ValueError`` naming the data's flag and the row for a missing
    column or an empty or malformed prompt, and ``--prompt_max_len`` if no prompt is left.
    """
    keys = None if options.input_key is None else {"prompt": (options.input_key, "--input_key")}
    reader = RowReader(rows, "prompts", options, keys=keys, also=options.label_key)

    def render(fields: RowFields) -> Prompt:
        reader_of_images = vision or RowVision(None, (), tokenizer, options=options)
        return reader_of_images.render(fields)

    rendered = reader.make(render, Prompt, show, tokenizer=tokenizer)
    prompts = []
    n_cut = 0
    for row, whole in zip(rows, rendered, strict=True):
        with naming_row(row):
            if options.label_key is None:
                label = reader.read(row).label
            else:
                label = value_of(row.row, options.label_key, "--label_key")
            prompt = fitted_prompt(whole, tokenizer, options)
        if prompt is not whole:
            n_cut += 1
        prompts.append(
            replace(prompt, label=label, row=row.row, source=row.source, index=row.number - 1)
        )

    if n_cut:
        logger.info(
            "%s: of %d prompts %d were cut to %s %d (%s)",
            rows[0].flag,
            len(rows),
            n_cut,
            "--prompt_max_len",
            options.prompt_max_len,
            options.prompt_truncation,
        )
    return reader.within(("--prompt_max_len", options.prompt_max_len), prompts)


def load_tasks(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptDataConfig,
    show: ShowRows = iter,
    vision: RowVision | None = None,
) -> list[Prompt]:
    """Load prompts like ``load_prompts``; rows of no known format become prompts without text, for agents to read."""
    if options.input_key is None:
        try:
            RowReader(rows, "prompts", options)
        except ValueError as error:
            logger.info("%s Its rows are given to the agent as they are.", error)
            return [_prompt_without_text(row, options.label_key) for row in rows]
    return load_prompts(rows, tokenizer, options, show=show, vision=vision)


def _prompt_without_text(row: SourceRow, label_key: str | None) -> Prompt:
    labels = descend(row.row, label_key or "")
    return Prompt(
        text="",
        token_ids=[],
        label=labels[0] if labels else None,
        row=row.row,
        source=row.source,
        index=row.number - 1,
    )


def fitted_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, options: PromptDataConfig
) -> Prompt:
    """Cut ``prompt`` to ``--prompt_max_len`` as ``--prompt_truncation`` says; a BOS in front and messages stay."""
    ids = prompt.token_ids
    max_len = options.prompt_max_len
    side = options.prompt_truncation
    if len(ids) <= max_len or side == "drop":
        return prompt
    if side == "error":
        raise ValueError(
            f"{len(ids)} tokens, above --prompt_max_len {max_len}: raise it, or use --prompt_truncation drop."
        )
    if prompt.media:
        raise ValueError(
            f"{len(ids)} tokens, those of its images included, above --prompt_max_len {max_len}, and images cannot be "
            "cut: raise it, or use --prompt_truncation drop."
        )

    n_bos = 1 if max_len > 1 and ids[0] == tokenizer.bos_token_id else 0
    room = max_len - n_bos
    n_head = {"left": 0, "right": room, "middle": room // 2}[side]  # as in verl
    n_tail = room - n_head
    ids = [*ids[: n_bos + n_head], *ids[len(ids) - n_tail :]]
    return replace(prompt, text=str(tokenizer.decode(ids)), token_ids=ids)


def seed_prompts(n: int) -> list[Prompt]:
    """Make prompts without text, for the seeds of an environment."""
    return [Prompt("", [], index=number) for number in range(n)]


def load_sft_examples(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: SFTDataConfig,
    show: ShowRows = iter,
    vision: RowVision | None = None,
) -> list[TokenExample]:
    """Load one example per row, in order, without those longer than ``supervised.max_len`` tokens.

    Targets are the response and the EOS after it; in a chat, all turns of the assistant, each with its end; in a row
    without a response, or with ``data.output_key`` None, all tokens; in a row with images, which ``vision`` reads, the
    response to its prompt. Raises ``ValueError`` naming the data's flag and the row for a missing column or a malformed
    value, and ``--max_len`` if no example is left.
    """
    # A default does not count as named.
    are_named = data.input_key is not None or data.output_key != SFTDataConfig.output_key
    column = (data.input_key or "input", "--input_key")
    keys: Keys = {"whole": column}
    if data.output_key is not None:
        keys = {"prompt": column, "response": (data.output_key, "--output_key")}
    reader = RowReader(rows, "sft", supervised, keys=keys if are_named else None)

    def render(fields: RowFields) -> TokenExample:
        if vision is None:
            return render_text(fields)
        return vision.example(fields, render_text)

    def render_text(fields: RowFields) -> TokenExample:
        if fields.whole is not None:
            whole = render_whole(fields.whole, tokenizer, supervised, tools=fields.tools)
            return all_targets(whole.token_ids)
        if fields.conversation is not None and supervised.apply_chat_template:
            return render_whole(fields.conversation, tokenizer, supervised, tools=fields.tools)
        return render_response(
            fields.prompt, fields.response, tokenizer, options=supervised, tools=fields.tools
        )

    examples = reader.make(render, TokenExample, show, tokenizer=tokenizer)
    return reader.within(("--max_len", supervised.max_len), examples)


def load_documents(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    key: str | None,
    max_len: int,
    show: ShowRows = iter,
    processes: int = 0,
) -> list[TokenExample]:
    """Load documents of ``--pretrain_data`` for the PTX loss: BOS if the tokenizer adds one, text, EOS.

    All tokens are targets. The text is column ``key``, else recognized. A document is cut after ``max_len`` tokens;
    an empty one is left out. Raises ``ValueError`` naming the flag and the row for a missing column or a value that
    is not text, or if all documents are empty.
    """
    flag = "--pretrain_data"
    keys = None if key is None else {"whole": (key, "pretrain_key")}
    options = RowsConfig(dataset_num_proc=processes)
    reader = RowReader(rows, "documents", options, keys=keys)

    def render(fields: RowFields) -> TokenExample:
        text = as_text(fields.whole)
        if not text.strip():
            return all_targets([])
        return all_targets(render_whole(text, tokenizer, options).token_ids)

    examples = []
    n_empty = 0
    n_cut = 0
    for document in reader.make(render, TokenExample, show, tokenizer=tokenizer):
        ids = document.token_ids
        if not ids:
            n_empty += 1
            continue
        if len(ids) > max_len:
            n_cut += 1
        examples.append(all_targets(ids[:max_len]))

    if not examples:
        raise ValueError(f"{flag}: every text is empty. Name another column with pretrain_key.")
    if n_empty or n_cut:
        logger.info(
            "%s: of %d documents %d are empty, %d are cut at %d tokens",
            flag,
            len(rows),
            n_empty,
            n_cut,
            max_len,
        )
    return examples
