"""Pages through NIXL (RDMA, shared memory or TCP) by way of Ray Direct Transport. Above some 10 MB it wins.

What Ray demands, each learnt from a failure: the tensor is contiguous, its reference travels nested, and it is
fetched by ``ray.get`` in a thread (awaiting the reference fails). The agents poll: a process that opened this
transport keeps a core busy while it idles, so nothing opens it unless it was chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from deployments.ticket import Ticket, join_pages, split_pages
from deployments.transport.base import Page
from deployments.transport.object_store import get_in_thread
from scd_core.errors import ProducerUnavailableError, TransportError


class NixlTransport:
    """The parcel is a list with one reference to a tensor of bytes that stays in the producer's memory.

    Raises:
        TransportError: the optional package is not installed.
    """

    name = "nixl"

    def __init__(self) -> None:
        if find_spec("nixl") is None:
            raise TransportError("NIXL is not installed: pip install 'semantic-cache-distillation[rdma]'")

    async def publish(self, pages: Sequence[bytes]) -> list[Any]:
        tensor = torch.frombuffer(bytearray(join_pages(pages)[0]), dtype=torch.uint8)
        try:
            return [await asyncio.to_thread(self._put, tensor)]
        except (RayError, RuntimeError, ValueError) as error:
            raise TransportError(f"NIXL cannot publish {tensor.nbytes} bytes: {error}") from error

    @staticmethod
    def _put(tensor: torch.Tensor) -> Any:
        return ray.put(tensor, _tensor_transport="nixl")

    async def fetch(self, ticket: Ticket, timeout_s: float) -> list[Page]:
        try:
            tensor = await get_in_thread(ticket.parcel, timeout_s)
        except TransportError as error:
            # a producer that died shows as an error of the direct transport, not of ownership
            if "RayDirectTransportError" in str(error):
                raise ProducerUnavailableError("the producer went before its codes were fetched") from error
            raise
        return list(split_pages(memoryview(tensor.cpu().numpy()).cast("B"), ticket.sizes))
