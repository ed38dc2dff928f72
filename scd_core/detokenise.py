"""Tokens to text, one token at a time: no character in halves, no part of a stop string, nothing lost at the end.

Convention: the texts returned join to ``tokenizer.decode(ids, skip_special_tokens=True)``, cut before the first
stop string. Special tokens are never shown, but stop strings are searched in the text that has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that ``skip_special_tokens`` leaves out, with their text."""
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | {index: str(tokenizer.convert_ids_to_tokens(index)) for index in tokenizer.all_special_ids}


class Detokeniser:
    """The text of one request.

    Args:
        special: of ``special_ids``; computed once per tokenizer by whoever makes many of these.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        special: dict[int, str] | None = None,
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer) if special is None else special
        self._stop = tuple(stop)
        # ids[:read] are in the text; decoding starts at ids[start]: a token is decoded beside its neighbours
        self._ids: list[int] = []
        self._start = self._read = 0
        self._held: list[tuple[str, bool]] = []  # text not yet sent, and whether it may be

    def push(self, token_id: int) -> str:
        """The text that may be sent after this token. Sets ``stopped`` when a stop string is complete."""
        if self.stopped:
            return ""
        if token_id in self._special:
            self._held.append((self._special[token_id], False))
        else:
            self._ids.append(token_id)
            before, now = self._decode(self._read), self._decode(len(self._ids))
            if len(now) > len(before) and not now.endswith(INCOMPLETE):
                self._held.append((now[len(before) :], True))
                self._start, self._read = self._read, len(self._ids)
        return self._release(final=False)

    def finish(self) -> str:
        """What is still held, at the end of the tokens."""
        if self.stopped:
            return ""
        before, now = self._decode(self._read), self._decode(len(self._ids))
        self._held.append((now[len(before) :], True))
        self._start = self._read = len(self._ids)
        return self._release(final=True)

    def _decode(self, end: int) -> str:
        text = self._tokenizer.decode(self._ids[self._start : end], clean_up_tokenization_spaces=False)
        return str(text)

    def _release(self, final: bool) -> str:
        raw = "".join(text for text, _ in self._held)
        found = [place for place in (raw.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped = True
            return self._take(min(found))
        return self._take(len(raw) if final else len(raw) - self._ambiguous(raw))

    def _ambiguous(self, raw: str) -> int:
        """Length of the longest end of ``raw`` that begins a stop string."""
        longest = min(len(raw), max((len(stop) for stop in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            tail = raw[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _take(self, length: int) -> str:
        """Remove the first characters from what is held; those that may be sent."""
        sent: list[str] = []
        while self._held and length > 0:
            text, visible = self._held.pop(0)
            if len(text) > length:
                self._held.insert(0, (text[length:], visible))
            if visible:
                sent.append(text[:length])
            length -= len(text)
        return "".join(sent)
