"""Actor, critic, reward model and losses. Names load on first use, so a loss imports torch alone."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.models.actor import Actor as Actor
    from openppo.models.log_probs import (
        compute_approx_kl as compute_approx_kl,
        masked_mean as masked_mean,
    )
    from openppo.models.log_probs import log_probs_from_logits as log_probs_from_logits
    from openppo.models.loss import (
        CISPOLoss as CISPOLoss,
        GSPOLoss as GSPOLoss,
        PolicyLoss as PolicyLoss,
    )
    from openppo.models.loss import (
        DecoupledLoss as DecoupledLoss,
        DoubleSidedLoss as DoubleSidedLoss,
    )
    from openppo.models.loss import (
        POLICY_LOSSES as POLICY_LOSSES,
        ValueLoss as ValueLoss,
        policy_loss as policy_loss,
    )
    from openppo.models.loss_weights import token_weights as token_weights
    from openppo.models.scalar_head import ScalarHeadModel as ScalarHeadModel
    from openppo.models.scalar_head import (
        get_llm_for_sequence_regression as get_llm_for_sequence_regression,
    )
    from openppo.models.supervised_loss import GPTLMLoss as GPTLMLoss, LogExpLoss as LogExpLoss
    from openppo.models.supervised_loss import PairWiseLoss as PairWiseLoss, PRMLoss as PRMLoss

__getattr__, __dir__, __all__ = lazy_names(__name__)
