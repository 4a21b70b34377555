"""packed.py: same numbers, same decoding, embeddings and weights untouched."""

import torch
from conftest import make_llama
from test_glide import decode, make_drafter

import packed


def test_packed_layers_compute_the_same_for_any_number_of_rows():
    layer = torch.nn.Linear(33, 50).requires_grad_(False)
    inputs = [torch.randn(*shape, 33) for shape in ((1,), (2,), (3,), (5,), (40,), (1, 1), (2, 3), (1, 7))]
    expected = [layer(x) for x in inputs]
    packed.pack(layer)
    for x, y in zip(inputs, expected):
        torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-5)


def test_other_types_are_left_alone():
    layer = packed.pack(torch.nn.Linear(8, 8).double())
    assert "forward" not in vars(layer)


def test_packed_decoding_is_still_lossless():
    target = make_llama().float()
    drafter = packed.pack(make_drafter(target, draft_vocab=20).float())
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    truth = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=40, do_sample=False)
    packed.pack(target)
    output, stats = decode(target, drafter, torch.tensor([[5, 6, 7]]))
    assert torch.equal(output, truth) and stats.emitted == 40
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())
