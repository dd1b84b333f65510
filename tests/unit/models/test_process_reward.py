"""A process reward model gives the plain model's logits, where they are asked for and nowhere else."""

import torch

from openppo.models.scalar_head import ProcessRewardModel

SEQUENCES = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
PLACES = torch.zeros(2, 6, dtype=torch.bool)
PLACES[0, [2, 5]] = True
PLACES[1, [1, 2, 3]] = True


def test_logits_at_places_are_those_of_the_plain_model(any_causal):
    model = any_causal().eval()
    plain = [model(input_ids=SEQUENCES[:1]).logits[0, [2, 5]], model(input_ids=SEQUENCES[1:, :4]).logits[0, [1, 2, 3]]]
    torch.testing.assert_close(ProcessRewardModel(model)(SEQUENCES, PLACES), torch.cat(plain), rtol=0, atol=1e-5)


def test_the_vocabulary_is_reached_only_in_columns_with_a_place(llama):
    model, widths = llama(), []

    def see(_, inputs, __):
        widths.append(inputs[0].shape[1])

    model.get_output_embeddings().register_forward_hook(see)
    ProcessRewardModel(model)(SEQUENCES, PLACES)
    assert widths == [4]  # columns 1, 2, 3 and 5 of 6


def test_without_a_place_the_model_runs_and_gradients_are_zero(llama):
    model = llama()
    logits = ProcessRewardModel(model)(SEQUENCES, torch.zeros_like(PLACES))
    assert logits.shape == (0, model.config.vocab_size)
    logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
