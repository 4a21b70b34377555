"""Batches for training, with the target's hidden states, keys and values."""

import contextlib
import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save_file
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
    """

    def __init__(self, target, layers: list[int], folder=None):
        self.target = target
        self.layers = sorted(set(layers))
        self.folder = None
        if folder:
            self.folder = Path(folder) / fingerprint(target)
            self.folder.mkdir(parents=True, exist_ok=True)

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
        """All sequences in order, eight in a batch, for acceptance rates."""
        starts = range(0, len(sequences), 8)
        bar = tqdm(starts, "sequences to measure", disable=None)
        return [self.batch(sequences[start : start + 8], 0.0) for start in bar]

    def _stored(self, ids: Tensor) -> dict[str, Tensor]:
        """The states of ids (T,) by name ("hidden", "k3", "v3"), from their file.

        Missing or damaged states are computed and written.
        """
        name = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32]
        path = self.folder / f"{name}.safetensors"
        states = {}
        # A file that this user may not read ends the run: rewriting it would be
        # another user's loss.
        with contextlib.suppress(FileNotFoundError, SafetensorError):  # or damaged
            states = load(path.read_bytes())
        wanted = {"hidden", *(f"{x}{layer}" for layer in self.layers for x in "kv")}
        if states.keys() >= wanted:
            return states
        row = ids[None].to(self.target.device)
        hidden, kv = common.target_features(self.target, row, self.layers)
        computed = {"hidden": hidden}
        for layer in self.layers:
            computed[f"k{layer}"], computed[f"v{layer}"] = kv[layer]
        for name, x in computed.items():  # next to what earlier runs kept
            states[name] = x[0].to("cpu", torch.bfloat16).contiguous()
        try:
            with files.whole(path) as part:
                save_file(states, part)
        except SafetensorError as error:
            raise common.UserError(
                f"cannot write {path} ({error}); make room"
            ) from error
        return states


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
