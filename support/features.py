"""The frozen target's view of the training sequences: computed when needed, or kept in a folder."""

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


def check_target(target, tokenizer) -> None:
    """Raise a Mistake if drafters cannot be trained for this target."""
    common.check_target(target)
    vocab_size = common.target_shape(target)["vocab_size"]
    if len(tokenizer) > vocab_size:
        raise common.Mistake(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {vocab_size}: give a "
            "--target whose files belong together"
        )
    # Every method learns from logits that are computed from the last hidden states.
    ids = torch.arange(min(8, vocab_size), device=target.device)[None]
    with torch.no_grad():
        theirs = target(ids).logits.float().cpu()  # (1, T, V)
    hidden, _ = common.target_features(target, ids)
    known = hidden.shape[-1] == target.get_output_embeddings().weight.shape[1]
    if known:
        ours = common.target_logits(target, hidden).cpu()
        tolerance = 3e-2 if target.dtype == torch.bfloat16 else 1e-3
        known = bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())
    if not known:
        raise common.Mistake(
            f"{type(target).__name__} computes its logits from its last hidden states in a way "
            "that common.target_logits does not know: take another target"
        )


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
        mark.update(repr((name, tuple(x.shape), str(x.dtype))).encode())
        if x.is_meta:  # on the disk, for want of memory
            continue
        bits = x.detach().reshape(-1).contiguous()
        bits = bits.view(BITS[bits.element_size()])
        some = bits[:: max(1, len(bits) // 61)].tolist()
        mark.update(repr((int(bits.sum(dtype=torch.int64)), some)).encode())
    return mark.hexdigest()[:16]


class Features:
    """Sequences, and the target's hidden states, keys and values of them.

    With a folder, sequences are taken in order of length, 32 to a file of bfloat16 tensors. A file
    is written whole or not at all, serves every later run with the same data and target, and grows
    when the keys and values of other layers are wanted.

    Args:
        sequences: of (token ids (T,), loss mask (T,)).
        layers: whose keys and values are wanted.
        folder: where to keep them; None computes them for each batch.
    """

    GROUP = 32

    def __init__(self, target, sequences, layers: list[int], folder: str | None):
        self.target = target
        self.sequences = sequences
        self.layers = sorted(set(layers))
        self.names = ["hidden", *(f"{kind}{layer}" for layer in self.layers for kind in "kv")]
        self.folder = None
        if not folder:
            return
        content = hashlib.sha256(fingerprint(target).encode())
        for ids, _ in sequences:
            content.update(f"{len(ids)} ".encode() + ids.numpy().tobytes())
        self.folder = Path(folder) / content.hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i][0]), i))
        self.groups = [order[i : i + self.GROUP] for i in range(0, len(order), self.GROUP)]
        self.place = {}  # {sequence: (file, row)}
        for number, group in enumerate(self.groups):
            self.place |= {index: (number, row) for row, index in enumerate(group)}
        self.files: dict[int, object] = {}

    def batch(self, indices: list[int], seed: Tensor, progress: float) -> common.Batch:
        """The sequences `indices`, right-padded, on the target's device."""
        device = self.target.device
        ids, mask = zip(*(self.sequences[index] for index in indices))
        ids = pad_sequence(ids, batch_first=True).to(device)  # (B, T)
        mask = pad_sequence(mask, batch_first=True).to(device)  # (B, T)
        if self.folder is None:
            hidden, kv = common.target_features(self.target, ids, self.layers)
        else:
            hidden, kv = self._stored(indices)
        hidden = hidden.to(device)  # a target on several devices leaves it on the last one
        kv = {layer: (k.to(device), v.to(device)) for layer, (k, v) in kv.items()}
        return common.Batch(ids, mask, hidden, kv, seed.to(device), progress)

    def batches(self, name: str, size: int = 8) -> list[common.Batch]:
        """All sequences in order, to measure an acceptance rate on."""
        self.compute_all(name)
        found = []
        starts = range(0, len(self.sequences), size)
        for start in tqdm(starts, desc=f"batches for {name}", leave=False, disable=None):
            indices = list(range(start, min(start + size, len(self.sequences))))
            found.append(self.batch(indices, torch.tensor(indices), 0.0))
        return found

    def compute_all(self, name: str = "training") -> None:
        """Write the files that are missing, with a progress bar."""
        if self.folder:
            for group in tqdm(range(len(self.groups)), desc=f"features for {name}", disable=None):
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
        ids = pad_sequence([self.sequences[i][0] for i in group], batch_first=True)
        hidden, kv = common.target_features(self.target, ids.to(self.target.device), layers)
        tensors = {"hidden": hidden}
        for layer in layers:
            tensors[f"k{layer}"], tensors[f"v{layer}"] = kv[layer]
        stored = {name: x.to("cpu", torch.bfloat16).contiguous() for name, x in tensors.items()}
        part = path.with_suffix(f".{os.getpid()}")
        try:
            save_file(stored, part)
            part.replace(path)
        except SafetensorError as error:
            raise common.Mistake(f"cannot write {path} ({error}); make room") from error
        finally:
            part.unlink(missing_ok=True)

    def _stored(self, indices: list[int]) -> tuple[Tensor, dict]:
        """Hidden states (B, T, D) and {layer: (K, V)}, as `common.target_features` gives them."""
        stacked = {}
        for name in self.names:
            rows = [self._rows(index, name) for index in indices]  # each (T_i, ...)
            stacked[name] = pad_sequence(rows, batch_first=True)
        kv = {}
        for layer in self.layers:
            keys, values = stacked[f"k{layer}"], stacked[f"v{layer}"]  # (B, T, Hkv, Dh)
            kv[layer] = (keys.transpose(1, 2), values.transpose(1, 2))
        return stacked["hidden"], kv

    def _rows(self, index: int, name: str) -> Tensor:
        """One stored tensor of a sequence, time first and without padding."""
        group, row = self.place[index]
        length, stored = len(self.sequences[index][0]), self._open(group).get_slice(name)
        if name == "hidden":
            return stored[row, :length]  # (T, D)
        return stored[row, :, :length].transpose(0, 1)  # (T, Hkv, Dh)
