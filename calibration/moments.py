"""Second moments of paired states: all that a linear fit needs of a corpus, at a size that the corpus cannot grow.

Convention: x is the producer's state, y the specialist's over the same token ids; both are ``[L, T, d]`` stacks,
one row of L per layer. Sums are kept in float64 on the CPU, where a chunk is folded in and forgotten; the sink
tokens are left out, because nothing is fitted to them (:data:`scd_core.encoder.SINK_TOKENS`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scd_core.capture import StateChunk, capture
from scd_core.encoder import SINK_TOKENS, Kind
from scd_core.errors import CorpusError
from scd_core.huggingface import LoadedModel


@dataclass(frozen=True, slots=True)
class Covariances:
    """Means and covariances of one layer's pair: ``mean_x`` ``[dx]``, ``xx`` ``[dx, dx]``, ``xy`` ``[dx, dy]``."""

    count: int
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor


class PairMoments:
    """Running sums of x, y, xx, xy and yy for a stack of L layers."""

    NAMES = ("x", "y", "xx", "xy", "yy")

    def __init__(self, layers: int, dx: int, dy: int) -> None:
        self.count = 0
        shapes = {"x": (dx, 1), "y": (dy, 1), "xx": (dx, dx), "xy": (dx, dy), "yy": (dy, dy)}
        self.sums = {name: torch.zeros(layers, *shape, dtype=torch.float64) for name, shape in shapes.items()}

    def update(self, x: Tensor, y: Tensor) -> None:
        """Folds in a chunk, ``[L, T, dx]`` and ``[L, T, dy]``.

        Raises:
            ValueError: the shapes are not those of this stack, or x and y differ in tokens.
        """
        layers, dx, dy = self.sums["xy"].shape
        tokens = x.shape[1]
        if x.shape != (layers, tokens, dx) or y.shape != (layers, tokens, dy):
            raise ValueError(f"chunk {tuple(x.shape)}, {tuple(y.shape)} for moments {(layers, dx, dy)}")
        x, y = x.to("cpu", torch.float64), y.to("cpu", torch.float64)
        one = torch.ones(layers, tokens, 1, dtype=torch.float64)
        # in place: allocating [L, d, d] for every chunk cost ten times the product itself
        for name, left, right in (("x", x, one), ("y", y, one), ("xx", x, x), ("xy", x, y), ("yy", y, y)):
            self.sums[name].baddbmm_(left.mT, right)
        self.count += tokens

    def merge(self, other: PairMoments) -> None:
        """Adds what another run has seen."""
        for name in self.NAMES:
            self.sums[name] += other.sums[name]
        self.count += other.count

    def of(self, index: int) -> Covariances:
        """Means and covariances of the ``index``-th layer of the stack.

        Raises:
            CorpusError: nothing was folded in.
        """
        if self.count == 0:
            raise CorpusError(f"no token behind the {SINK_TOKENS} sinks of any prompt: nothing to fit on")
        x, y, xx, xy, yy = (self.sums[name][index] / self.count for name in self.NAMES)
        return Covariances(self.count, x[:, 0], y[:, 0], xx - x @ x.T, xy - x @ y.T, yy - y @ y.T)


class StateMoments:
    """Moments of keys and values of all layers, and of the hidden inputs of ``hidden_layers``."""

    def __init__(self, producer: LoadedModel, specialist: LoadedModel, hidden_layers: Sequence[int]) -> None:
        self.hidden_layers = tuple(hidden_layers)
        layers, wide = producer.layers, len(self.hidden_layers)
        self.pairs: dict[Kind, PairMoments] = {
            "k": PairMoments(layers, producer.kv_dim, specialist.kv_dim),
            "v": PairMoments(layers, producer.kv_dim, specialist.kv_dim),
            "h": PairMoments(wide, producer.hidden_size, specialist.hidden_size),
        }
        self.prompts = 0

    def update(self, producer: LoadedModel, specialist: LoadedModel, ids: Sequence[int]) -> None:
        """Folds in one prompt, chunk by chunk through both models."""
        chunks = [capture(model, ids, hidden_layers=self.hidden_layers) for model in (producer, specialist)]
        for mine, theirs in zip(*chunks, strict=True):
            skip = max(0, SINK_TOKENS - mine.start)
            for kind, pair in self.pairs.items():
                if pair.sums["x"].shape[0]:
                    x, y = (stacked(chunk, kind, self.hidden_layers)[:, skip:] for chunk in (mine, theirs))
                    pair.update(x, y)
        self.prompts += 1

    def of(self, layer: int, kind: Kind) -> Covariances:
        """Covariances of one stream."""
        return self.pairs[kind].of(self.hidden_layers.index(layer) if kind == "h" else layer)

    def save(self, path: Path) -> None:
        """Writes the sums and how many prompts they cover; replaces ``path`` atomically."""
        tensors = {f"{kind}.{name}": s for kind, pair in self.pairs.items() for name, s in pair.sums.items()}
        counts = {kind: pair.count for kind, pair in self.pairs.items()}
        state = {"prompts": self.prompts, "counts": counts, "hidden_layers": self.hidden_layers}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, draft, {"moments": json.dumps(state)})
        os.replace(draft, path)

    def load(self, path: Path) -> None:
        """Goes on from what ``save`` wrote.

        Raises:
            CorpusError: the file cannot be read, or holds moments of other shapes or layers.
        """
        try:
            with safe_open(path, "pt") as file:
                state = json.loads(file.metadata()["moments"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
            mine = {
                f"{kind}.{name}": tuple(s.shape) for kind, p in self.pairs.items() for name, s in p.sums.items()
            }
            if shapes != mine or tuple(state["hidden_layers"]) != self.hidden_layers:
                raise ValueError("other shapes or layers")
            for kind, pair in self.pairs.items():
                pair.sums = {name: tensors[f"{kind}.{name}"] for name in pair.NAMES}
                pair.count = state["counts"][kind]
            self.prompts = state["prompts"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CorpusError(f"{path}: not these moments ({error}); delete it to start afresh") from error


def stacked(chunk: StateChunk, kind: Kind, hidden_layers: Sequence[int]) -> Tensor:
    """One kind of a chunk's state: ``[L, T, d]``, or ``[len(hidden_layers), T, hidden]``."""
    if kind == "h":
        return torch.stack([chunk.hidden[layer] for layer in hidden_layers])
    return chunk.content.keys if kind == "k" else chunk.content.values
