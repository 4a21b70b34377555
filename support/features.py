"""The target's states of training sequences, computed or kept in files."""

import hashlib
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import common


def check_trainable(target, tokenizer) -> None:
    """Raise a Mistake if drafters cannot be trained for this target."""
    common.check_target(target)
    vocab_size = common.target_shape(target)["vocab_size"]
    if len(tokenizer) > vocab_size:
        raise common.Mistake(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {vocab_size}: give a "
            "--target whose files belong together"
        )
    common.check_states(target)


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
    """Sequences with the target's hidden states, keys and values.

    A folder holds bfloat16 tensors, 32 sequences of similar length per file.
    Later runs with the same data and target read the files. A file is
    rewritten if the keys and values of other layers are wanted.

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
        self.folder = None
        if not folder:
            return
        content = hashlib.sha256(fingerprint(target).encode())
        for ids, _ in sequences:
            content.update(f"{len(ids)} ".encode() + ids.numpy().tobytes())
        self.folder = Path(folder) / content.hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i][0]), i))
        self.place = {index: place for place, index in enumerate(self.order)}
        self.files = {}

    def batch(self, indices: list[int], seed: Tensor, progress: float) -> common.Batch:
        """The sequences `indices`, right-padded, on the target's device."""
        device = self.target.device
        ids, mask = zip(*(self.sequences[index] for index in indices))
        ids = pad_sequence(ids, batch_first=True).to(device)  # (B, T)
        mask = pad_sequence(mask, batch_first=True).to(device)  # (B, T)
        if self.folder is None:
            hidden, kv = common.target_features(self.target, ids, self.layers)
        else:
            stored = partial(self._stored, indices=indices, length=ids.shape[1])
            hidden = stored("hidden")
            kv = {layer: (stored(f"k{layer}"), stored(f"v{layer}")) for layer in self.layers}
        hidden = hidden.to(device)  # stored features lie on the CPU
        kv = {layer: (k.to(device), v.to(device)) for layer, (k, v) in kv.items()}
        return common.Batch(ids, mask, hidden, kv, seed.to(device), progress)

    def batches(self, name: str) -> list[common.Batch]:
        """All sequences in order, eight per batch, for acceptance rates."""
        parts = torch.arange(len(self.sequences)).split(8) if self.sequences else []
        parts = tqdm(parts, desc=f"batches for {name}", leave=False, disable=None)
        return [self.batch(indices.tolist(), indices, 0.0) for indices in parts]

    def compute_all(self) -> None:
        """Write the files that are missing, with a progress bar."""
        if self.folder:
            numbers = range(-(-len(self.order) // self.GROUP))
            for number in tqdm(numbers, desc="features for training", disable=None):
                self._open(number)

    def _open(self, number: int):
        """A file of features, rewritten if missing, damaged or incomplete."""
        if number in self.files:
            return self.files[number]
        path = self.folder / f"{number:05d}.safetensors"
        wanted = set(self.layers)
        try:
            names = safe_open(path, "pt").keys()
            there = {int(name[1:]) for name in names if name != "hidden"}
        except (FileNotFoundError, SafetensorError):
            there = None
        if there is None or wanted - there:
            group = self.order[number * self.GROUP :][: self.GROUP]
            self._write(path, group, sorted(wanted | (there or set())))
        self.files[number] = safe_open(path, "pt")
        return self.files[number]

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

    def _stored(self, name: str, indices: list[int], length: int) -> Tensor:
        """A stored tensor, cut or padded to `length` in dimension -2."""
        rows = []
        for index in indices:
            number, row = divmod(self.place[index], self.GROUP)
            x = self._open(number).get_slice(name)[row][..., :length, :]  # (T, D), (Hkv, T, Dh)
            rows.append(F.pad(x, (0, 0, 0, length - x.shape[-2])))
        return torch.stack(rows)
