"""Same seed, same bytes: made data, trained drafters, sampled answers.

And answers that end where the context does.
"""

import pytest
import torch
from test_distributed import arguments
from test_families import make_drafter
from test_faults import TRAINED
from test_house import METHODS
from test_properties import TARGETS, VOCAB
from test_train import folder  # noqa: F401  a fixture
from tiny import slow

import common
import train


@pytest.mark.slow
def test_made_data(folder, tmp_path):  # noqa: F811
    def made(name, seed):
        argv = f"--make-data 3 --target {folder} --out {tmp_path / name} --device cpu"
        train.main([*argv.split(), "--data-batch", "4", "--second-turns", "0.3", "--seed", seed])
        return (tmp_path / name).read_bytes()

    first = made("a", "3")
    assert made("b", "3") == first and made("c", "4") != first


@pytest.mark.parametrize("method", TRAINED)
def test_training(folder, tmp_path, method):  # noqa: F811
    def trained(name, seed):
        train.main(arguments(method, folder, tmp_path / name, "--seed", seed))
        files = ("config.json", "model.safetensors")
        return [(tmp_path / name / file).read_bytes() for file in files]

    first = trained("a", "3")
    assert trained("b", "3") == first and trained("c", "4") != first


@pytest.mark.parametrize("method", [name if name == "cape" else slow(name) for name in METHODS])
def test_sampling(method, tmp_path):
    target = TARGETS["Llama"]
    options = make_drafter(method, target, tmp_path)

    def sampled(seed):
        torch.manual_seed(seed)
        return target.generate(
            torch.tensor([[3, 1, 4]]), max_new_tokens=30, do_sample=True, **options
        ).tolist()

    first = sampled(0)
    assert sampled(0) == first and sampled(1) != first


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_up_to_the_last_place_of_the_context(method, tmp_path, monkeypatch):
    """The limit cuts drafts short; one token more is refused before anything is decoded."""
    target = TARGETS["Llama"]
    options = make_drafter(method, target, tmp_path)
    monkeypatch.setattr(target.config, "max_position_embeddings", 32)
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    rounds, verify = [], common.verify

    def noted(target, input_ids, draft, *more, **options):
        rounds.append((input_ids, draft))
        return verify(target, input_ids, draft, *more, **options)

    monkeypatch.setattr(common, "verify", noted)
    output = target.generate(ids, max_new_tokens=23, do_sample=False, **options)
    plain = target.generate(ids, max_new_tokens=23, do_sample=False)
    assert output.shape[1] == 32 and torch.equal(output, plain)
    for input_ids, draft in rounds:
        depth = common.ancestor_mask(draft.parents, 0, torch.float32)[0, 0].eq(0).sum(-1).max() - 1
        assert input_ids.shape[1] + int(depth) < 32  # the bonus token has a place
    count = len(rounds)
    with pytest.raises(ValueError, match="= 33 exceed the target's context of 32"):
        target.generate(ids, max_new_tokens=24, do_sample=False, **options)
    assert len(rounds) == count
