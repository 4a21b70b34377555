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
        self.names = ["hidden"]
        for layer in self.layers:
            self.names += [f"k{layer}", f"v{layer}"]
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
            states = self._compute(input_ids)
        else:
            rows = [self._stored(each) for each in ids]
            states = {}
            for name in self.names:
                x = _stack([row[name] for row in rows], input_ids.shape[1])
                states[name] = x.to(device)
        kv = {layer: (states[f"k{layer}"], states[f"v{layer}"]) for layer in self.layers}
        return common.Batch(input_ids, loss_mask, states["hidden"], kv, seed.to(device), progress)

    def batches(self, sequences: list) -> list[common.Batch]:
        """All sequences in order, eight per batch, for acceptance rates."""
        found = []
        for start in tqdm(range(0, len(sequences), 8), "sequences to measure", disable=None):
            part = sequences[start : start + 8]
            found.append(self.batch(part, torch.arange(start, start + len(part)), 0.0))
        return found

    def _compute(self, ids: Tensor) -> dict[str, Tensor]:
        """Hidden states (B, T, D), keys and values (B, Hkv, T, Dh) of ids (B, T), by name."""
        hidden, kv = common.target_features(self.target, ids, self.layers)
        states = {"hidden": hidden}
        for layer in self.layers:
            states[f"k{layer}"], states[f"v{layer}"] = kv[layer]
        return states

    def _stored(self, ids: Tensor) -> dict[str, Tensor]:
        """The same of one sequence, without B, from its file, which is written if need be."""
        name = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32]
        path = self.folder / f"{name}.safetensors"
        states = {}
        try:
            states = load_file(path)
        except (FileNotFoundError, SafetensorError):  # missing or damaged
            pass
        if states.keys() >= set(self.names):
            return states
        for name, x in self._compute(ids[None].to(self.target.device)).items():
            states[name] = x[0].to("cpu", torch.bfloat16).contiguous()
        part = path.with_suffix(f".{os.getpid()}")
        try:
            save_file(states, part)
            part.replace(path)
        except SafetensorError as error:
            raise common.Mistake(f"cannot write {path} ({error}); make room") from error
        finally:
            part.unlink(missing_ok=True)
        return states


def _stack(rows: list[Tensor], length: int) -> Tensor:
    """One tensor of all rows, each padded to `length` in dimension -2."""
    return torch.stack([F.pad(x, (0, 0, 0, length - x.shape[-2])) for x in rows])
