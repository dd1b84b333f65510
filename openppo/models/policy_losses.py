"""Names that moved to ``openppo.models.loss``; kept for one release."""

from openppo.models.loss import POLICY_LOSSES, CISPOLoss, GSPOLoss, policy_loss, token_weights

__all__ = ["POLICY_LOSSES", "CISPOLoss", "GSPOLoss", "policy_loss", "token_weights"]
