"""What an answer and a cache are judged by.

Answers: F1 and exact match by the official definition of the reference's language, SQuAD's for English (and
whatever splits at spaces), CMRC2018's for Chinese. Caches: KL per position, agreement of the next token and
perplexity, all over logits ``[T, V]`` (T positions, V vocabulary), in nats.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE = re.compile(r"[\u4e00-\u9fa5]")
# The list of CMRC2018's script. Its entry "……" is two characters, which no single character equals: an
# ellipsis is therefore kept there, and here.
_CMRC_REMOVED = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
# CMRC2018 splits what is not Chinese with nltk's word_tokenize; this is that for words, numbers and punctuation.
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]\w*|\w+|[^\w\s]")


def squad_normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's ``normalize_answer``)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def squad_f1(prediction: str, reference: str) -> float:
    """F1 of the bags of words of the normalised texts (SQuAD 2.0's rule where one of them is empty)."""
    predicted, wanted = squad_normalise(prediction).split(), squad_normalise(reference).split()
    if not predicted or not wanted:
        return float(predicted == wanted)
    return _f1(sum((Counter(predicted) & Counter(wanted)).values()), len(predicted), len(wanted))


def squad_exact(prediction: str, reference: str) -> float:
    """1 where the normalised texts are equal."""
    return float(squad_normalise(prediction) == squad_normalise(reference))


def cmrc_segments(text: str) -> list[str]:
    """Mixed segmentation without punctuation: one segment per Chinese character, one per other word."""
    segments: list[str] = []
    other = ""
    for char in text.lower().strip():
        if char in _CMRC_REMOVED:
            continue
        if _CHINESE.match(char):
            segments += [*_WORD.findall(other), char]
            other = ""
        else:
            other += char
    return segments + _WORD.findall(other)


def longest_common_run(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest run of segments that both hold (CMRC2018's ``find_lcs``)."""
    best = 0
    above = [0] * (len(second) + 1)
    for a in first:
        row = [0] * (len(second) + 1)
        for j, b in enumerate(second):
            if a == b:
                row[j + 1] = above[j] + 1
                best = max(best, row[j + 1])
        above = row
    return best


def cmrc_f1(prediction: str, reference: str) -> float:
    """F1 of the longest common run of segments (CMRC2018's ``calc_f1_score``)."""
    predicted, wanted = cmrc_segments(prediction), cmrc_segments(reference)
    return _f1(longest_common_run(wanted, predicted), len(predicted), len(wanted))


def cmrc_exact(prediction: str, reference: str) -> float:
    """1 where the texts are equal but for case and punctuation (CMRC2018's ``calc_em_score``)."""
    return float(_cmrc_bare(prediction) == _cmrc_bare(reference))


def answer_f1(prediction: str, references: Sequence[str]) -> float:
    """The best F1 over the references, each by the definition of its language."""
    return max(_by_language(r, squad_f1, cmrc_f1)(prediction, r) for r in references)


def answer_exact(prediction: str, references: Sequence[str]) -> float:
    """1 where one reference is matched exactly, by the definition of its language."""
    return max(_by_language(r, squad_exact, cmrc_exact)(prediction, r) for r in references)


def kl_per_position(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) in nats of logits ``[T, V]``: ``[T]``."""
    log_p = torch.log_softmax(teacher.float(), -1)
    log_q = torch.log_softmax(student.float(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def agreement_per_position(teacher: Tensor, student: Tensor) -> Tensor:
    """1 where both put the same token first, of logits ``[T, V]``: ``[T]``."""
    return (teacher.argmax(-1) == student.argmax(-1)).float()


def nll_per_position(logits: Tensor, next_ids: Sequence[int]) -> Tensor:
    """Negative log likelihood in nats of each next token under logits ``[T, V]``: ``[T]``."""
    wanted = torch.as_tensor(next_ids, device=logits.device)
    return torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")


def perplexity(nll: Sequence[float]) -> float:
    """``exp`` of the mean negative log likelihood per token; infinite where that overflows."""
    mean = sum(nll) / len(nll)
    return math.exp(mean) if mean < 700 else math.inf


def bootstrap_interval(
    values: Sequence[float], seed: int, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float]:
    """The percentile bootstrap's confidence interval of the mean of ``values``."""
    rng = random.Random(seed)
    n = len(values)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(resamples))
    tail = (1 - level) / 2
    return means[int(tail * (resamples - 1))], means[math.ceil((1 - tail) * (resamples - 1))]


def _f1(common: int, predicted: int, wanted: int) -> float:
    if common == 0:
        return 0.0
    precision, recall = common / predicted, common / wanted
    return 2 * precision * recall / (precision + recall)


def _cmrc_bare(text: str) -> str:
    return "".join(c for c in text.lower().strip() if c not in _CMRC_REMOVED)


_Metric = Callable[[str, str], float]


def _by_language(reference: str, english: _Metric, chinese: _Metric) -> _Metric:
    return chinese if _CHINESE.search(reference) else english
