"""Batches for training, with the target's hidden states, keys and values."""

import hashlib
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import common


def fingerprint(target) -> str:
    """A hash of the target: its config and 1000 numbers of every tensor."""
    config = target.config.to_dict()
    for key in ("_name_or_path", "transformers_version"):  # not content
        config.pop(key, None)
    mark = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, x in target.state_dict().items():
        mark.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        some = x.reshape(-1)[:: max(1, x.numel() // 1000)]
        mark.update(some.double().cpu().numpy().tobytes())
    return mark.hexdigest()[:16]


class Features:
    """Makes batches of sequences, which are (token ids (T,), loss mask (T,)).

    With a folder, what the target computes is kept there in bfloat16, one
    file for each sequence, for later epochs and runs on the same target.

    Args: layers: of the target, whose keys and values are wanted.
    """

    def __init__(self, target, layers: list[int], folder: str | None):
        self.target = target
        self.layers = sorted(set(layers))
        self.folder = None
        if folder:
            self.folder = Path(folder) / fingerprint(target)
            self.folder.mkdir(parents=True, exist_ok=True)

    def batch(self, sequences: list, seed: Tensor, progress: float) -> common.Batch:
        """The sequences, right-padded, on the target's device."""
        device = self.target.device
        ids, masks = zip(*sequences)
        input_ids = pad_sequence(ids, batch_first=True).to(device)  # (B, T)
        loss_mask = pad_sequence(masks, batch_first=True).to(device)  # (B, T)
        if self.folder is None:
            hidden, kv = common.target_features(self.target, input_ids, self.layers)
        else:
            rows = [self._stored(each) for each in ids]
            hidden = _stack(rows, "hidden").to(device)
            kv = {}
            for layer in self.layers:
                kv[layer] = tuple(_stack(rows, f"{x}{layer}").to(device) for x in "kv")
        return common.Batch(input_ids, loss_mask, hidden, kv, seed.to(device), progress)

    def batches(self, sequences: list) -> list[common.Batch]:
        """All sequences in order, eight per batch, for acceptance rates."""
        found = []
        for start in tqdm(range(0, len(sequences), 8), "sequences to measure", disable=None):
            part = sequences[start : start + 8]
            found.append(self.batch(part, torch.arange(start, start + len(part)), 0.0))
        return found

    def _stored(self, ids: Tensor) -> dict[str, Tensor]:
        """The states of ids (T,) by name ("hidden", "k3", "v3"), from their file or computed."""
        name = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32]
        path = self.folder / f"{name}.safetensors"
        try:
            states = load_file(path)
        except (FileNotFoundError, SafetensorError):  # missing or damaged
            states = {}
        if states.keys() >= {"hidden", *(f"k{layer}" for layer in self.layers)}:
            return states
        row = ids[None].to(self.target.device)
        hidden, kv = common.target_features(self.target, row, self.layers)
        computed = {"hidden": hidden}
        for layer in self.layers:
            computed[f"k{layer}"], computed[f"v{layer}"] = kv[layer]
        for name, x in computed.items():
            states[name] = x[0].to("cpu", torch.bfloat16).contiguous()
        part = path.with_suffix(f".{os.getpid()}")
        try:
            save_file(states, part)
            part.replace(path)
        except SafetensorError as error:
            raise common.UserError(f"cannot write {path} ({error}); make room") from error
        finally:
            part.unlink(missing_ok=True)
        return states


def _stack(rows: list[dict], name: str) -> Tensor:
    """One tensor of all rows' states of a name, padded in dimension -2."""
    states = [row[name] for row in rows]
    length = max(x.shape[-2] for x in states)
    return torch.stack([F.pad(x, (0, 0, 0, length - x.shape[-2])) for x in states])
