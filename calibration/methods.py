"""Hands codes over: the real pages of the wire, counted as sent, with headers and digests."""

from __future__ import annotations

import torch

from calibration.harness import Parcel, PrefixState
from scd_core.capture import ContentKV
from scd_core.codec import SINK_TOKENS, Decoder, Encoder
from scd_core.huggingface import LoadedModel
from scd_core.packing import Packer
from scd_core.pages import page_hashes
from scd_core.wire import CodePage, read_pages, write_page


class Coded:
    """A codec between the pair. The specialist's clock covers reading and checking the pages, and decoding."""

    def __init__(self, name: str, encoder: Encoder, decoder: Decoder, specialist: LoadedModel) -> None:
        self.name = name
        self.encoder, self._decoder, self._specialist = encoder, decoder, specialist
        self._packer = Packer.of(encoder)

    def send(self, prefix: PrefixState) -> Parcel:
        codes = self.encoder.encode(prefix.state).cpu()
        size, digest = self.encoder.page_size, bytes.fromhex(self.encoder.digest)
        hashes = page_hashes(prefix.token_ids, size)
        pages = [
            write_page(CodePage(digest, prefix_hash, index, size, rows), self._packer)
            for index, (prefix_hash, rows) in enumerate(zip(hashes, codes.split(size), strict=True))
        ]

        def open_parcel(sinks: ContentKV) -> ContentKV:
            received = read_pages(
                pages,
                packer=self._packer,
                encoder_digest=digest,
                prefix_hashes=hashes,
            ).to(self._specialist.device)
            return with_sinks(self._decoder.decode(received, prefix.token_ids, self._specialist), sinks)

        return Parcel(sum(len(page) for page in pages), open_parcel)


def with_sinks(content: ContentKV, sinks: ContentKV) -> ContentKV:
    """``content`` with its first tokens' replaced by the specialist's own."""
    sink_tokens = min(SINK_TOKENS, content.tokens)
    return ContentKV(
        torch.cat([sinks.keys[:, :sink_tokens], content.keys[:, sink_tokens:]], 1),
        torch.cat([sinks.values[:, :sink_tokens], content.values[:, sink_tokens:]], 1),
    )
