"""Batches for training, with the target's hidden states, keys and values."""

import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import common
from support import files


class Features:
    """Makes batches of sequences, which are (token ids (T,), loss mask (T,)).

    layers: of the target, whose keys and values are wanted.
    folder: what the target computes is kept there in bfloat16, one file for each
        sequence, for later epochs and runs on the same target. None: it is computed
        for each batch.
    vocab_ids: (Vd,) the drafter's. With a folder, batches have a common.Teacher of it.
    """

    def __init__(self, target, layers: list[int], folder=None, vocab_ids=None):
        self.target = target
        self.layers = sorted(set(layers))
        self.vocab_ids = vocab_ids
        self.folder = None
        if folder:
            self.folder = Path(folder) / fingerprint(target)
            self.folder.mkdir(parents=True, exist_ok=True)
            vocabulary = hashlib.sha256(vocab_ids.cpu().numpy().tobytes())
            self.taught = [
                f"{name}-{vocabulary.hexdigest()[:16]}"
                for name in common.Teacher._fields
            ]

    def batch(self, sequences: list, progress: float) -> common.Batch:
        """The sequences, right-padded, on the target's device."""
        device = self.target.device
        ids, masks = zip(*sequences)
        input_ids = pad_sequence(ids, batch_first=True).to(device)  # (B, T)
        loss_mask = pad_sequence(masks, batch_first=True).to(device)  # (B, T)
        if self.folder is None:
            hidden, kv = common.target_features(self.target, input_ids, self.layers)
        else:
            stored = [self._stored(each) for each in ids]
            hidden = _stack(stored, "hidden").to(device)
            kv = {}
            for layer in self.layers:
                kv[layer] = tuple(
                    _stack(stored, f"{x}{layer}").to(device) for x in "kv"
                )
        return common.Batch(input_ids, loss_mask, hidden, kv, progress)

    def batches(self, sequences: list) -> list[common.Batch]:
        """All sequences in order, eight per batch, for acceptance rates."""
        found = []
        starts = range(0, len(sequences), 8)
        for start in tqdm(starts, "sequences to measure", disable=None):
            part = sequences[start : start + 8]
            seed = torch.arange(start, start + len(part))
            found.append(self.batch(part, seed, progress=0.0))
        return found

    def _stored(self, ids: Tensor) -> dict[str, Tensor]:
        """The states of ids (T,) by name ("hidden", "k3", "v3"), from their file.

        The names of a common.Teacher's also contain the draft vocabulary's hash.
        Missing or damaged states are computed and written.
        """
        name = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32]
        path = self.folder / f"{name}.safetensors"
        try:
            states = load_file(path)
        except (FileNotFoundError, SafetensorError):  # missing or damaged
            states = {}
        wanted = {"hidden", *(f"k{layer}" for layer in self.layers), *self.taught}
        if states.keys() >= wanted:
            return states
        states |= self._computed(ids)  # next to what earlier runs kept
        try:
            with files.whole(path) as part:
                save_file(states, part)
        except SafetensorError as error:
            raise common.UserError(
                f"cannot write {path} ({error}); make room"
            ) from error
        return states

    def _computed(self, ids: Tensor) -> dict[str, Tensor]:
        """The states of ids (T,) by name, numbers in bfloat16, on the CPU."""
        row = ids[None].to(self.target.device)
        hidden, kv = common.target_features(self.target, row, self.layers)
        states = {"hidden": hidden}
        for layer in self.layers:
            states[f"k{layer}"], states[f"v{layer}"] = kv[layer]
        states = {name: x[0] for name, x in states.items()}
        teacher = common.teach(self.target, hidden[0], self.vocab_ids)
        states |= zip(self.taught, (teacher.mean, *(x[:, None] for x in teacher[1:])))
        return {
            name: x.to(
                "cpu", torch.bfloat16 if x.is_floating_point() else torch.int32
            ).contiguous()
            for name, x in states.items()
        }


def _stack(sequences: list[dict], name: str) -> Tensor:
    """One tensor of all sequences' states of a name, padded in dimension -2."""
    states = [each[name] for each in sequences]
    length = max(x.shape[-2] for x in states)
    return torch.stack([F.pad(x, (0, 0, 0, length - x.shape[-2])) for x in states])


def fingerprint(target) -> str:
    """A hash of the target: its config, and 1000 numbers of each plain tensor."""
    config = target.config.to_dict()
    for key in ("_name_or_path", "transformers_version"):  # not content
        config.pop(key, None)
    text = json.dumps(config, sort_keys=True, default=str)
    mark = hashlib.sha256(text.encode())
    for name, x in target.state_dict().items():
        mark.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        if type(x) is Tensor and not x.is_meta:  # else it is quantised or offloaded
            some = x.reshape(-1)[:: max(1, x.numel() // 1000)]
            mark.update(some.double().cpu().numpy().tobytes())
    return mark.hexdigest()[:16]
