"""Serve a reward model over HTTP, for --remote_rm_url."""

import logging
from functools import partial

from openppo.cli.options import Runnable, run_command
from openppo.config import ServeRMConfig

logger = logging.getLogger("openppo")


def _build(config: ServeRMConfig) -> Runnable:
    import torch  # heavy: after parsing

    from openppo.models.loading import attention_implementation, model_error_context
    from openppo.models.pretrained import check_model, check_token_ids, context_length, load_tokenizer, pad_token_id
    from openppo.models.scalar_head import get_llm_for_sequence_regression
    from openppo.rewards.http import read_token
    from openppo.rewards.model import forward_scores, stored_normalization
    from openppo.rewards.server import RewardServer, encode_conversation, listen
    from openppo.strategy.comm import set_up_gpu

    options, flag, name = config.server, "--reward_pretrain", config.server.reward_pretrain
    set_up_gpu(options.bf16)
    token = None if options.token_file is None else read_token(options.token_file, "--token_file")
    listener = listen(options.host, options.port)
    attention_implementation(options.flash_attn, options.bf16)
    model_config = check_model(name, flag, options.trust_remote_code)
    tokenizer = load_tokenizer(name, flag, trust_remote_code=options.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{flag} {name}: its tokenizer has no EOS token, at which a text is scored.")
    check_token_ids(model_config, f"{flag} {name}", tokenizer, [[tokenizer.eos_token_id]])
    max_len = min(options.max_len, context_length(model_config) or options.max_len)
    if max_len < options.max_len:
        logger.warning("%s %s: --max_len %d is cut to its context, %d tokens", flag, name, options.max_len, max_len)
    mean, std = 0.0, 1.0
    if options.normalize_reward:
        remedy = "Train it with openppo.cli.train_rm, which stores them, or leave --normalize_reward out."
        mean, std = stored_normalization(model_config, f"{flag} {name}", remedy)
    with model_error_context(flag, name):
        model = get_llm_for_sequence_regression(
            name,
            "reward",
            bf16=options.bf16,
            flash_attn=options.flash_attn,
            value_head_prefix=options.value_head_prefix,
            trust_remote_code=options.trust_remote_code,
        )
    device, pad = torch.device("cuda" if torch.cuda.is_available() else "cpu"), pad_token_id(tokenizer)
    model.eval().to(device)

    def encode(text: str) -> list[int]:
        ids = encode_conversation(tokenizer, text, max_len)
        check_token_ids(model_config, "the reward model", tokenizer, [ids])
        return ids

    def score(rows: list[list[int]]) -> list[float]:
        return [(score - mean) / std for score in forward_scores(model, rows, pad, device)]

    return RewardServer(score=score, encode=encode, listener=listener, config=options, token=token)


main = partial(run_command, ServeRMConfig, _build)

if __name__ == "__main__":
    main()
