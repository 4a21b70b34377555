"""The frozen target's view of the training sequences: computed when needed, or kept in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import common

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def fingerprint(target) -> str:
    """A mark that changes with any weight of the target, its dtype or its configuration.

    Of every tensor: shape, the sum of its bits read as integers (exact, whatever the order and the
    number of threads), and a few values, by which an exchange of two rows would show as well.
    """
    config = target.config.to_dict()
    for key in ("_name_or_path", "transformers_version"):  # the same target from another place
        config.pop(key, None)
    mark = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, x in target.state_dict().items():
        bits = x.detach().reshape(-1).contiguous()
        bits = bits.view(BITS[bits.element_size()])
        some = bits[:: max(1, len(bits) // 61)].tolist()
        total = int(bits.sum(dtype=torch.int64))
        mark.update(repr((name, tuple(x.shape), str(x.dtype), total, some)).encode())
    return mark.hexdigest()[:16]


class Features:
    """The target's hidden states and K/V of the training sequences.

    With a folder, sequences are taken in order of length, 32 to a file of bfloat16 tensors. A file
    is written whole or not at all, serves every later run with the same data and target, and grows
    when other layers' K/V are wanted.

    Args:
        sequences: of (token ids (T,), loss mask (T,)).
        layers: whose K/V are wanted.
        folder: where to keep them; None computes them for each batch.
        mark: the target's fingerprint, made here unless it is at hand.
    """

    GROUP = 32

    def __init__(self, target, sequences, layers: list[int], folder: str | None, mark: str = ""):
        self.target = target
        self.ids = [ids for ids, _ in sequences]
        self.layers = sorted(set(layers))
        self.names = ["hidden", *(f"{kind}{layer}" for layer in self.layers for kind in "kv")]
        self.folder = None
        if not folder:
            return
        whole = hashlib.sha256((mark or fingerprint(target)).encode())
        for ids in self.ids:
            whole.update(f"{len(ids)} ".encode() + ids.numpy().tobytes())
        self.folder = Path(folder) / whole.hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        order = sorted(range(len(self.ids)), key=lambda i: (len(self.ids[i]), i))
        self.groups = [order[i : i + self.GROUP] for i in range(0, len(order), self.GROUP)]
        self.place = {}  # {sequence: (file, row)}
        for number, group in enumerate(self.groups):
            self.place |= {index: (number, row) for row, index in enumerate(group)}
        self.files: dict[int, object] = {}

    def compute_all(self) -> None:
        """Write the files that are missing, with a progress bar."""
        if self.folder:
            for group in tqdm(range(len(self.groups)), desc="target features", disable=None):
                self._open(group)

    def _open(self, group: int):
        """The file of a group; written first if it is missing, damaged or lacks a layer."""
        if group in self.files:
            return self.files[group]
        path = self.folder / f"{group:05d}.safetensors"
        have = []
        with contextlib.suppress(FileNotFoundError, SafetensorError):
            with safe_open(path, "pt") as file:
                have = list(file.keys())
        if set(self.names) - set(have):
            old_layers = {int(name[1:]) for name in have if name != "hidden"}
            self._write(path, self.groups[group], sorted(old_layers | set(self.layers)))
        self.files[group] = safe_open(path, "pt")
        return self.files[group]

    def _write(self, path: Path, group: list[int], layers: list[int]) -> None:
        ids = pad_sequence([self.ids[i] for i in group], batch_first=True)
        hidden, kv = common.target_features(self.target, ids.to(self.target.device), layers)
        tensors = {"hidden": hidden}
        for layer in layers:
            tensors[f"k{layer}"], tensors[f"v{layer}"] = kv[layer]
        stored = {name: x.to("cpu", torch.bfloat16).contiguous() for name, x in tensors.items()}
        part = path.with_suffix(f".{os.getpid()}")
        try:
            save_file(stored, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def of(self, indices: list[int], input_ids: Tensor) -> tuple[Tensor, dict]:
        """Hidden states (B, T, D) and {layer: (K, V)} of the right-padded `input_ids` (B, T)."""
        if self.folder is None:
            return common.target_features(self.target, input_ids, self.layers)
        stacked = {}
        for name in self.names:
            rows = [self._rows(index, name) for index in indices]  # each (T_i, ...)
            stacked[name] = pad_sequence(rows, batch_first=True).to(input_ids.device)
        kv = {}
        for layer in self.layers:
            keys, values = stacked[f"k{layer}"], stacked[f"v{layer}"]  # (B, T, Hkv, Dh)
            kv[layer] = (keys.transpose(1, 2), values.transpose(1, 2))
        return stacked["hidden"], kv

    def _rows(self, index: int, name: str) -> Tensor:
        """One stored tensor of a sequence, time first and without padding."""
        group, row = self.place[index]
        length, stored = len(self.ids[index]), self._open(group).get_slice(name)
        if name == "hidden":
            return stored[row, :length]  # (T, D)
        return stored[row, :, :length].transpose(0, 1)  # (T, Hkv, Dh)
