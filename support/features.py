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
            found = self._compute(input_ids)
        else:
            rows = [self._stored(each) for each in ids]
            found = {}
            for name in self.names:
                tensors = [row[name] for row in rows]  # each (T, D) or (Hkv, T, Dh)
                found[name] = _stack(tensors, input_ids.shape[1]).to(device)
        kv = {layer: (found[f"k{layer}"], found[f"v{layer}"]) for layer in self.layers}
        return common.Batch(input_ids, loss_mask, found["hidden"], kv, seed.to(device), progress)

    def batches(self, sequences: list, name: str) -> list[common.Batch]:
        """All sequences in order, eight per batch, for acceptance rates."""
        found = []
        for start in tqdm(range(0, len(sequences), 8), f"batches for {name}", disable=None):
            part = sequences[start : start + 8]
            found.append(self.batch(part, torch.arange(start, start + len(part)), 0.0))
        return found

    def _compute(self, ids: Tensor) -> dict[str, Tensor]:
        hidden, kv = common.target_features(self.target, ids, self.layers)
        found = {"hidden": hidden}
        for layer in self.layers:
            found[f"k{layer}"], found[f"v{layer}"] = kv[layer]
        return found

    def _stored(self, ids: Tensor) -> dict[str, Tensor]:
        """The tensors of a sequence, from its file, which is written if need be."""
        path = self.folder / hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32]
        try:
            found = load_file(path)
            if found.keys() >= set(self.names):
                return found
        except (FileNotFoundError, SafetensorError):  # missing or damaged
            pass
        found = self._compute(ids[None].to(self.target.device))
        found = {name: x[0].to("cpu", torch.bfloat16).contiguous() for name, x in found.items()}
        part = path.with_suffix(f".{os.getpid()}")
        try:
            save_file(found, part)
            part.replace(path)
        except SafetensorError as error:
            raise common.Mistake(f"cannot write {path} ({error}); make room") from error
        finally:
            part.unlink(missing_ok=True)
        return found


def _stack(rows: list[Tensor], length: int) -> Tensor:
    """Tensors padded to `length` in dimension -2, as one batch."""
    return torch.stack([F.pad(x, (0, 0, 0, length - x.shape[-2])) for x in rows])
