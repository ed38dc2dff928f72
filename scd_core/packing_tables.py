"""The tables of :mod:`scd_core.packing`: which columns code alike, how symbols are joined, and by which codes.

A set of tables is ``classes`` ``[C]`` (the class of each column), ``joins`` ``[K, 2]`` (radius and group of each
class) and ``dictionaries`` ``[K, D]`` (a zstd dictionary per class; all zeros for none), all uint8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import zstandard as zs
from numpy.typing import NDArray
from torch import Tensor

from scd_core.errors import ArtefactFormatError

Bytes = NDArray[np.uint8]
ESCAPE = 255
CLASSES = 16
DICTIONARY_BYTES = 256  # the least zstd trains; nearly all of it is the Huffman table
JOINS = ((1, 5), (1, 4), (1, 3), (2, 3), (2, 2), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2), (127, 1))
"""(radius, group): ``group`` symbols within +-radius make one byte. The last takes any symbol."""

# matches between random symbols cost more than they save: a tiny hash table finds only the long runs of zeros
PARAMETERS: dict[str, Any] = {
    "format": zs.FORMAT_ZSTD1_MAGICLESS,
    "write_content_size": False,
    "write_dict_id": False,
    "min_match": 7,
    "hash_log": 6,
}


def join(symbols: Bytes, radius: int, group: int) -> tuple[Bytes, Bytes]:
    """Bytes of ``group`` symbols each (the end padded with zeros), and the escaped groups' symbols."""
    if group == 1:
        return symbols, symbols[:0]
    padded = np.concatenate([symbols, np.zeros(-symbols.size % group, np.uint8)]).reshape(-1, group)
    digits = padded + np.uint8(radius)  # wraps: what lies outside +-radius lands above 2 * radius
    outside = (digits > 2 * radius).any(axis=1)
    joined = digits[:, 0].copy()
    for index in range(1, group):
        joined *= 2 * radius + 1
        joined += digits[:, index]
    joined[outside] = ESCAPE
    return joined, padded[outside].ravel()


def expansion(radius: int, group: int) -> Bytes:
    """``[256, group]``: the symbols that each byte stands for; zeros where it stands for none."""
    base = 2 * radius + 1
    values = np.arange(256)
    digits = np.stack([values // base**power % base for power in reversed(range(group))], axis=1)
    digits = np.where((values < base**group)[:, None], digits - radius, 0)
    return digits.astype(np.int8).view(np.uint8)


def trivial_tables(columns: int) -> dict[str, Tensor]:
    return {
        "classes": torch.zeros(columns, dtype=torch.uint8),
        "joins": torch.tensor([[127, 1]], dtype=torch.uint8),
        "dictionaries": torch.zeros(1, 0, dtype=torch.uint8),
    }


def checked(
    tables: Mapping[str, Tensor], columns: int
) -> tuple[Bytes, list[tuple[int, int]], list[zs.ZstdCompressionDict | None]]:
    """Classes ``[C]``, joins, and a dictionary (or none) per class; ArtefactFormatError when they do not fit."""
    try:
        classes, joins, dictionaries = (tables[name] for name in ("classes", "joins", "dictionaries"))
    except KeyError as error:
        raise ArtefactFormatError(f"packing: no table {error}") from error
    count = joins.shape[0]
    if any(t.dtype != torch.uint8 for t in (classes, joins, dictionaries)) or not (
        classes.shape == (columns,) and joins.shape == (count, 2) and dictionaries.shape[:1] == (count,)
    ):
        raise ArtefactFormatError(
            f"packing: {columns} columns, but classes {tuple(classes.shape)}, joins {tuple(joins.shape)}, "
            f"dictionaries {tuple(dictionaries.shape)}"
        )
    pairs = [(int(radius), int(group)) for radius, group in joins.tolist()]
    if any(p not in JOINS for p in pairs) or (columns and int(classes.max()) >= count):
        raise ArtefactFormatError(f"packing: joins {pairs} for classes up to {int(classes.max())}")
    return classes.numpy(), pairs, [_dictionary(row.numpy().tobytes()) for row in dictionaries]


def _dictionary(data: bytes) -> zs.ZstdCompressionDict | None:
    if not any(data):
        return None
    try:
        found = zs.ZstdCompressionDict(data, dict_type=zs.DICT_TYPE_FULLDICT)
        # parses it: a broken one would otherwise only show at the first page
        found.precompute_compress(compression_params=zs.ZstdCompressionParameters.from_level(1, **PARAMETERS))
    except zs.ZstdError as error:
        raise ArtefactFormatError(f"packing: broken dictionary: {error}") from error
    return found


def fit_packing(symbols: Tensor, page_size: int = 32) -> dict[str, Tensor]:
    """The tables for symbols like these: ``[N, C]`` int8, best a few thousand tokens.

    Columns are clustered by the bits that their symbols cost under the cluster's mean histogram (k-means in
    Kullback-Leibler divergence); the join of each class is the one that zstd compresses best.
    """
    if symbols.ndim != 2 or symbols.dtype != torch.int8:
        raise ArtefactFormatError(f"symbols {tuple(symbols.shape)} of {symbols.dtype} are not int8 [N, C]")
    sample = symbols.cpu().contiguous().numpy().view(np.uint8)
    classes = _cluster(_histograms(sample))
    count = int(classes.max(initial=0)) + 1
    joins: list[tuple[int, int]] = []
    dictionaries = np.zeros((count, DICTIONARY_BYTES), np.uint8)
    for index in range(count):
        columns = sample[:, classes == index]
        joins.append(min(JOINS, key=lambda j: _cost(columns[:1024].ravel(), *j)))
        pages: list[bytes | bytearray | memoryview] = [
            join(p.ravel(), *joins[-1])[0].tobytes() for p in _pages(columns, page_size)
        ]
        # zstd refuses to train on too little, and then each frame carries its own table
        try:
            trained = zs.train_dictionary(DICTIONARY_BYTES, pages, k=64, d=8, level=1).as_bytes()
            dictionaries[index, : len(trained)] = np.frombuffer(trained, np.uint8)
        except zs.ZstdError:
            pass
    return {
        "classes": torch.from_numpy(classes),
        "joins": torch.tensor(joins, dtype=torch.uint8),
        "dictionaries": torch.from_numpy(dictionaries),
    }


def _pages(columns: Bytes, page_size: int) -> Iterator[Bytes]:
    return (columns[start : start + page_size] for start in range(0, len(columns), page_size))


def _cost(symbols: Bytes, radius: int, group: int) -> int:
    joined, escaped = join(symbols, radius, group)
    parameters = zs.ZstdCompressionParameters.from_level(1, **PARAMETERS)
    return len(zs.ZstdCompressor(compression_params=parameters).compress(joined.tobytes())) + escaped.size


def _histograms(sample: Bytes) -> NDArray[np.float64]:
    """``[N, C] -> [C, 256]``."""
    columns = sample.shape[1]
    counts = np.zeros(columns * 256, np.int64)
    offsets = np.arange(columns) * 256
    for page in _pages(sample, 256):
        counts += np.bincount((page + offsets).ravel(), minlength=columns * 256)
    return counts.reshape(columns, 256).astype(np.float64)


def _cluster(counts_CS: NDArray[np.float64], rounds: int = 8) -> Bytes:
    """``[C, 256] -> [C]``: classes in the order of their columns' entropy, none empty."""
    if counts_CS.size == 0 or not counts_CS.any():
        return np.zeros(len(counts_CS), np.uint8)
    p_CS = (counts_CS + 1e-3) / (counts_CS + 1e-3).sum(1, keepdims=True)
    entropy_C = -(p_CS * np.log2(p_CS)).sum(1)
    edges = np.linspace(entropy_C.min(), entropy_C.max() + 1e-9, CLASSES + 1)[1:-1]
    classes = np.digitize(entropy_C, edges)
    for _ in range(rounds):
        present = np.unique(classes)
        means = np.stack([counts_CS[classes == k].sum(0) + 1e-2 for k in present])
        means /= means.sum(1, keepdims=True)
        classes = (p_CS @ -np.log2(means).T).argmin(1)
    return np.unique(classes, return_inverse=True)[1].astype(np.uint8)
