"""Check of a PPO run whose prompts have images."""

from transformers import PreTrainedConfig

from openppo.config import TrainPPOConfig
from openppo.datasets.image_families import check_images
from openppo.models.vision_models import placeholders
from openppo.rollout.vllm_requests import IMAGE_FAMILIES
from openppo.trainer.run_data import RunData


def check_run_with_images(
    config: TrainPPOConfig, data: RunData, actor_config: PreTrainedConfig
) -> None:
    """Raise ``ValueError`` if the model, the documents or the engine rule out prompts with images."""
    check_images(actor_config, f"--pretrain {config.model.pretrain}")

    reserved_ids = placeholders(actor_config).keys()
    for document in data.documents:
        if not reserved_ids.isdisjoint(document.token_ids):
            raise ValueError(
                "--pretrain_data: a document names the token that stands for an image. Remove it."
            )

    vllm_reads_them = "video" not in data.kinds and actor_config.model_type in IMAGE_FAMILIES
    if config.generation.rollout_engine == "vllm" and not vllm_reads_them:
        families = ", ".join(IMAGE_FAMILIES)
        raise ValueError(
            f"--rollout_engine vllm is given no videos, and images with models of type {families} only. "
            "Use --rollout_engine hf."
        )
