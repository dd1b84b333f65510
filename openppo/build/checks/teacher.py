"""Checks of the model that a run without rewards learns from, before its weights are loaded."""

from contextlib import suppress

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.models.pretrained import end_ids, load_tokenizer


def check_teacher(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    is_main: bool,
) -> None:
    """Raise ``ValueError`` if ``--ref_pretrain`` ends responses with a token that ends none of the policy's.

    Its vocabulary is known to be that of ``tokenizer``. Another chat template is a warning, of the main rank.
    """
    name = config.model.ref_pretrain
    assert name is not None, "--reward_fn none needs it"
    trust = config.model.trust_remote_code
    teacher = load_tokenizer(name, "--ref_pretrain", trust_remote_code=trust)

    end = teacher.eos_token_id
    if end is not None and end not in _ends(config, tokenizer, actor_config):
        raise ValueError(
            f"--ref_pretrain {name} ends responses with {teacher.eos_token}, which does not end those of --pretrain "
            f"{config.model.pretrain}: it would learn to write that token and to continue. Add {end} to "
            "--stop_token_ids."
        )

    renders = config.data.apply_chat_template or config.agents.form is not None
    if is_main and renders and teacher.chat_template != tokenizer.chat_template:
        kind = "another" if teacher.chat_template else "no"
        logger.warning(
            "--ref_pretrain %s has %s chat template, and reads prompts as that of --pretrain renders them. If it "
            "should read them as in its training, give its own template with --chat_template FILE.",
            name,
            kind,
        )


def _ends(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, actor_config: PreTrainedConfig
) -> set[int]:
    """Ids that end a response of the policy."""
    sources = [tokenizer, actor_config, actor_config.get_text_config()]
    with suppress(OSError):  # many folders have no generation_config.json
        sources.append(GenerationConfig.from_pretrained(config.model.pretrain))
    return end_ids(sources) | {*config.generation.stop_token_ids}
