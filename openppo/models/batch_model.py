"""The part that actor, critic and reward model have in common: the form in which they read a batch."""

from torch import nn

from openppo.media import Tokens


class BatchModel(nn.Module):
    """A module that reads a batch row by row with padding, or where that is exact as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.packs_rows = False
        """True if the rows of a batch go through the model as one row, without padding (see ``pack_where_exact``)."""
        self.shares_prompts = False
        """True if a batch becomes one row in which shared prefixes occur once (see ``share_where_exact``)."""
        self.stand_in: Tokens | None = None
        """Prompt with an image, for batches without any (see ``with_stand_in``)."""

    def use_packing(self, packs: bool) -> None:
        """Read the rows of a batch as one row without padding, or row by row."""
        self.packs_rows = packs

    def use_sharing(self, shares: bool) -> None:
        """Compute shared prefixes of a batch once, or for each row."""
        self.shares_prompts = shares

    def use_stand_in(self, stand_in: Tokens | None) -> None:
        """Add ``stand_in``, a prompt with an image, to batches without any."""
        self.stand_in = stand_in
