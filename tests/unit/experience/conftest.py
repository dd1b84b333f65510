"""Samples by hand."""

import pytest

from openppo.types import FinishReason, Prompt
from tests.samples import one_segment


@pytest.fixture
def make_sample():
    """Builds a sample of one segment from prompt ids, response ids and, unless all are, which of these are actions."""

    def make(prompt, response, actions=None, reason=FinishReason.STOP, **scores):
        mask = [False] * len(prompt) + [bool(a) for a in (actions or [1] * len(response))]
        return one_segment(
            token_ids=prompt + response,
            action_mask=mask,
            log_probs=[-0.5 - 0.125 * t if is_action else 0.0 for t, is_action in enumerate(mask)],
            versions=[0 if is_action else -1 for is_action in mask],
            finish_reason=reason,
            prompt=Prompt(text="", token_ids=prompt),
            group=0,
            scores=scores,
        )

    return make
