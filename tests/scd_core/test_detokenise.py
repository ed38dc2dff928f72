"""Incremental text against the tokenizer's own decoding of all tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scd_core.detokenise import Detokeniser

TEXTS = [
    "plain words, and more of them",
    "👩‍👩‍👧‍👦 family 🇨🇿 flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "한국어 문장입니다 그리고 또",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "漢字かな交じり文、句読点。",
    "  leading and   inner spaces \n\n and lines\n",
]
SPECIALS = ["<|im_start|>", "<|im_end|>"]


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, so that every character beyond ASCII is split; two merges; two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, "th", "the"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", extra_special_tokens=SPECIALS
    )


def metaspace() -> PreTrainedTokenizerFast:
    """Words with a leading mark for the space, unknown characters as bytes: Llama 2's and Mistral's kind."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁plain",
        "▁words",
        "▁more",
        "e",
        "o",
        "s",
    ]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", extra_special_tokens=SPECIALS)


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace()}


def bytes_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    if tokenizer is TOKENIZERS["byte_level"]:
        return tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]


def run(tokenizer: PreTrainedTokenizerFast, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces sent, and whether a stop string ended it."""
    text = Detokeniser(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            return pieces, True
    return [*pieces, text.finish()], text.stopped


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_and_split_no_character(kind: str, text: str) -> None:
    """Guards vllm-mlx#109. Every character beyond ASCII spans tokens here, so a decoder of single tokens fails."""
    tokenizer = TOKENIZERS[kind]
    ids = bytes_of(tokenizer, text)
    pieces, _ = run(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True) != ""
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_tokens_join_to_the_whole(kind: str) -> None:
    """Random tokens: special tokens inside characters, marks of spaces in any place, broken characters.

    Broken characters only where bytes stand for themselves: a byte fallback takes back a whole run of bytes,
    complete ASCII included, when a later one is wrong, so no stream could equal it.
    """
    tokenizer = TOKENIZERS[kind]
    chance = random.Random(0)
    whole = [[index] for index in range(256 + (kind == "metaspace"), len(tokenizer))]
    whole += [bytes_of(tokenizer, char) for char in "a👩漢한ř\n"]
    for _ in range(200):
        parts = [chance.choice(whole) for _ in range(chance.randrange(1, 20))]
        ids = [token for part in parts for token in part]
        if kind == "byte_level":
            chance.shuffle(ids)
        pieces, _ = run(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True), ids


def test_text_is_not_kept_back_without_need() -> None:
    """A detokeniser that holds all until the end would pass every test of equality."""
    tokenizer = TOKENIZERS["byte_level"]
    pieces, _ = run(tokenizer, tokenizer.encode("abc"), stop=("xyz",))
    assert pieces == ["a", "b", "c", ""]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", ("STOP",), "one "),
        ("one STOP two", ("P t", "STOP"), "one "),
        ("emoji 👩‍👩‍👧‍👦 end", ("👩‍👩‍👧‍👦",), "emoji "),
        ("漢字。かな", ("。",), "漢字"),
        ("aaab", ("aab",), "a"),  # the first a is held, then sent when the match turns out to begin later
        ("STOP", ("STOP",), ""),
        ("the thethe end", ("hethe",), "the t"),
        ("abcabd", ("abd",), "abc"),
    ],
)
def test_a_stop_string_is_found_and_never_sent(text: str, stop: tuple[str, ...], expected: str) -> None:
    """Guards vllm#3574: tokens are bytes here, so every stop string straddles tokens; no part of it may leave."""
    tokenizer = TOKENIZERS["byte_level"]
    pieces, stopped = run(tokenizer, tokenizer.encode(text), stop)
    assert stopped
    assert "".join(pieces) == expected


@pytest.mark.parametrize("end", ["one ST", "one STO", "ends in an emoji's half"])
def test_a_held_tail_is_flushed(end: str) -> None:
    """Guards llama.cpp#9867: the tokens end on the beginning of a stop string, which then is ordinary text."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(end)
    pieces, stopped = run(tokenizer, ids, ("STOP", "half a loaf"))
    assert not stopped
    assert "".join(pieces[:-1]) != end  # something was held
    assert "".join(pieces) == end


def test_a_broken_character_at_the_end_is_not_lost() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("x👩")[:-1]
    pieces, _ = run(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "x\ufffd"


@pytest.mark.parametrize("stop", ["<|im_end|>", "d<|im_end|>", "<|im_end|><|im_start|>"])
def test_special_tokens_stop_and_stay_hidden(stop: str) -> None:
    """Guards vllm#2123: decoding without special tokens never sees them, decoding with them shows them."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<|im_start|>said<|im_end|><|im_start|>user")
    pieces, stopped = run(tokenizer, ids, (stop,))
    assert stopped
    assert "".join(pieces) == ("sai" if stop.startswith("d") else "said")
    pieces, stopped = run(tokenizer, ids)
    assert (not stopped, "".join(pieces)) == (True, "saiduser")


def test_the_stream_does_not_depend_on_what_follows_the_stop() -> None:
    """After a stop nothing is sent, whatever is pushed."""
    tokenizer = TOKENIZERS["byte_level"]
    text = Detokeniser(tokenizer, ("b",))
    assert [text.push(token) for token in tokenizer.encode("abcb")] == ["a", "", "", ""]
    assert (text.stopped, text.finish()) == (True, "")
