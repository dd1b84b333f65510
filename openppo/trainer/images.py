"""Images in a PPO run: checks, and stand-ins for batches without any."""

from transformers import PreTrainedConfig

from openppo.config import TrainPPOConfig
from openppo.media import check_images, placeholders
from openppo.rollout.vllm_requests import IMAGE_FAMILIES
from openppo.trainer.data import PPOData


def check_run_with_images(
    config: TrainPPOConfig, data: PPOData, actor_config: PreTrainedConfig
) -> None:
    """``ValueError`` for what cannot work where prompts have images."""
    check_images(actor_config, f"--pretrain {config.model.pretrain}")
    if any(
        not placeholders(actor_config).keys().isdisjoint(document.token_ids)
        for document in data.documents
    ):
        raise ValueError(
            "--pretrain_data: a document names the token that stands for an image. Remove it."
        )
    in_vllm = "video" not in data.kinds and actor_config.model_type in IMAGE_FAMILIES
    if config.generation.rollout_engine == "vllm" and not in_vllm:
        what = (
            f"is given no videos, and images with models of type {', '.join(IMAGE_FAMILIES)} only"
        )
        raise ValueError(f"--rollout_engine vllm {what}. Use --rollout_engine hf.")
