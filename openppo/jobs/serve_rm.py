"""The serve_rm command: a reward model that scores the texts of requests."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import ServeRMConfig
from openppo.datasets.templates import encode_start
from openppo.model_inputs import ModelInputs
from openppo.models.loading import attention_implementation, model_error_context
from openppo.models.pretrained import (
    check_model,
    check_token_ids,
    context_length,
    load_tokenizer,
    pad_token_id,
)
from openppo.models.scalar_head import get_llm_for_sequence_regression
from openppo.models.vision_models import placeholders
from openppo.rewards.build import stored_normalization
from openppo.rewards.http import read_token
from openppo.rewards.model import forward_scores
from openppo.rewards.server import RewardServer, listen
from openppo.strategy.comm import set_up_gpu
from openppo.strategy.fused_kernels import fuse_kernels, has_kernels
from openppo.types import SingleProcess


def build_server(options: ServeRMConfig) -> RewardServer:
    """Load the reward model and open the port; ``ValueError`` names the flag to change."""
    flag = "--reward_pretrain"
    name = options.reward_pretrain
    where = f"{flag} {name}"
    trust = options.trust_remote_code

    set_up_gpu(options.bf16)
    token = None if options.token_file is None else read_token(options.token_file, "--token_file")
    listener = listen(options.host, options.port)
    attention_implementation(options.flash_attn, options.bf16)

    model_config = check_model(name, flag, trust)
    tokenizer = load_tokenizer(name, flag, trust_remote_code=trust)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{where}: its tokenizer has no EOS token, at which a text is scored.")
    check_token_ids(model_config, where, tokenizer, rows=[[tokenizer.eos_token_id]])

    max_len = min(options.max_len, context_length(model_config) or options.max_len)
    if max_len < options.max_len:
        logger.warning(
            "%s %s: --max_len %d is cut to its context, %d tokens",
            flag,
            name,
            options.max_len,
            max_len,
        )
    mean, std = 0.0, 1.0
    if options.normalize_reward:
        mean, std = stored_normalization(model_config, where)

    loading = {"bf16": options.bf16, "flash_attn": options.flash_attn, "trust_remote_code": trust}
    with model_error_context(flag, name):
        model = get_llm_for_sequence_regression(
            name, "reward", value_head_prefix=options.value_head_prefix, **loading
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.eval().to(device)
    if options.fused_kernels == "auto" and has_kernels(device, SingleProcess()):
        fuse_kernels(model, device, SingleProcess())

    def encode(text: str) -> list[int]:
        ids = encode_conversation(tokenizer, text, max_len)
        if not placeholders(model_config).keys().isdisjoint(ids):
            raise ValueError(
                "serve_rm reads no images, and a text names the token of one: use --reward_pretrain."
            )
        check_token_ids(model_config, "the reward model", tokenizer, rows=[ids])
        return ids

    pad = pad_token_id(tokenizer)

    def score(rows: list[list[int]]) -> list[float]:
        outputs = forward_scores(model, ModelInputs.of_ids(rows, pad).to(device))
        return [(output - mean) / std for output in outputs]

    return RewardServer(score=score, encode=encode, listener=listener, config=options, token=token)


def encode_conversation(tokenizer: PreTrainedTokenizerBase, text: str, max_len: int) -> list[int]:
    """Token ids of a text that holds a whole conversation, as OpenRLHF's server reads it.

    They end with one EOS. PAD around the text is dropped; a BOS comes first if the tokenizer puts one there. Only the
    last ``max_len`` ids are kept.
    """
    pad = tokenizer.pad_token
    eos = tokenizer.eos_token
    start = 0
    while pad and text.startswith(pad, start):
        start += len(pad)
    end = _end_without(text, [token for token in (pad, eos) if token], start)
    ids = [*encode_start(tokenizer, text[start:end]), tokenizer.eos_token_id]
    return ids[-max_len:]


def _end_without(text: str, tokens: Sequence[str], start: int) -> int:
    """Place in ``text`` where the ``tokens`` at its end, and blanks among them, begin; takes linear time."""
    end = last = len(text)
    while True:
        while last > start and text[last - 1].isspace():
            last -= 1
        endings = [token for token in tokens if text.endswith(token, start, last)]
        if not endings:
            return end
        end = last = last - len(endings[0])
