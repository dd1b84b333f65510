"""What tests of examples share: one way to call the loaders, templates of chats, targets as text."""

from itertools import groupby

from openppo.config import (
    PPODataConfig,
    PreferenceConfig,
    ProcessConfig,
    SFTDataConfig,
    SupervisedConfig,
)
from openppo.datasets import (
    load_documents,
    load_preferences,
    load_process_examples,
    load_prompts,
    load_sft_examples,
)
from openppo.datasets.sources import number_rows

SUPERVISED = {
    "sft": (load_sft_examples, SFTDataConfig),
    "pairs": (load_preferences, PreferenceConfig),
    "steps": (load_process_examples, ProcessConfig),
}
WITH_CHAT = {"apply_chat_template": True}
OPEN_WHEN_ASKED = "{% if add_generation_prompt %}<assistant>{% endif %}"
ENDS_IN_EOS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}" + OPEN_WHEN_ASKED
)
OTHER_WHEN_ASKED = (  # the prompt of a generation ends in '?', which a finished turn lacks
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>?{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load(task, rows, tokenizer, data=None, *, show=iter, **options):
    """What is made of ``rows``, of one file or already numbered; ``data`` are the options of columns."""
    rows = number_rows(rows, "file", flag_of(task)) if isinstance(rows[0], dict) else rows
    if task == "prompts":
        return load_prompts(rows, tokenizer, PPODataConfig("d", **options, **(data or {})), show)
    if task == "documents":
        return load_documents(
            rows, tokenizer, **{"key": None, "max_len": 100, **(data or {})}, show=show
        )
    loader, config = SUPERVISED[task]
    supervised = SupervisedConfig("m", "d", **{"max_len": 100_000, **options})
    return loader(rows, tokenizer, supervised, config(**(data or {})), show=show)


def flag_of(task):
    return {"prompts": "--prompt_data", "documents": "--pretrain_data"}.get(task, "--dataset")


def targets(example, tokenizer):
    return tokenizer.decode(
        [t for t, target in zip(example.token_ids, example.loss_mask, strict=True) if target]
    )


def shown(example, tokenizer):
    """The text, with its targets in «»."""
    parts = groupby(
        zip(example.token_ids, example.loss_mask, strict=True), key=lambda pair: pair[1]
    )
    texts = [(target, tokenizer.decode([token for token, _ in part])) for target, part in parts]
    return "".join(f"«{text}»" if target else text for target, text in texts)


def turns(**texts):
    """One turn for each role and its text."""
    return [{"role": role, "content": text} for role, text in texts.items()]
