"""Continuous batching of one model. With page_store.py, the only file that knows how transformers' continuous
batching works inside (the minor version is pinned in pyproject).

What is relied on, each pinned by a test in tests/scd_core/test_paged.py: ``init_continuous_batching`` makes a
manager whose attention implementation, logits processors and output router may be replaced until ``start``; its
thread then builds cache and batches from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from scd_core import attention
from scd_core.errors import EngineStoppedError
from scd_core.page_store import NATIVE, PageStore
from scd_core.sampling import Choice, choose

SAFETY_MARGIN = 0.15
"""Share of the cache that the scheduler keeps free for requests that run; the library's own default."""

STEP_TOKENS = 512
"""Tokens of one forward. Prompts are prefilled in pieces of it, so it bounds how long a running stream waits."""


@dataclass(frozen=True)
class Step:
    """One token of one request, or its failure."""

    index: int
    token_id: int
    finished: bool
    error: str | None = None


class PagedBatcher:
    """Generates for many requests at once, over a paged cache whose pages can be written from outside.

    Args:
        cache_tokens: capacity of the cache, rounded up to whole pages.
        max_batch: at most so many requests in one forward; more wait.
        on_death: called once, in a thread of its own, when the generation thread has ended, with its error if any.
    """

    pages: PageStore

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        page_size: int,
        cache_tokens: int,
        max_batch: int,
        on_death: Callable[[BaseException | None], None],
    ) -> None:
        self._model = model
        self._page_size = page_size
        self._on_death = on_death
        self._names = count()
        self._watcher: threading.Thread | None = None
        self._attention = model.config._attn_implementation
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=-(-cache_tokens // page_size),
            max_batch_tokens=max(STEP_TOKENS, max_batch),
            max_requests_per_batch=max_batch,
            allow_block_sharing=True,
            safety_margin=SAFETY_MARGIN,
            use_cuda_graph=False,  # a token is chosen in Python, which a graph would not run again
            use_async_batching=False,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        self._manager: Any = model.init_continuous_batching(generation, config)
        self._outbox = _Outbox()
        self._manager.output_router = self._outbox
        self._processors = _Processors()
        self._manager.logit_processor = self._processors

    def start(self) -> None:
        """Start the generation thread and wait until its cache exists."""
        softcap = getattr(self._model.config, "attn_logit_softcapping", None)  # the built-in ones ignore it
        if self._model.device.type == "cpu" or softcap is not None:
            self._model.set_attn_implementation(
                attention.NAME
            )  # the manager's own check knows built-in names only
        with torch.inference_mode(False):  # the loop inherits it; inference tensors cannot be written from outside
            self._manager.start()
        self._watcher = threading.Thread(
            target=self._watch, args=(self._manager._generation_thread,), name="scd-engine-watch", daemon=True
        )
        self._watcher.start()
        try:
            self.pages = PageStore(self._manager, self._page_size, SAFETY_MARGIN)
        except BaseException:
            self.stop()
            raise
        self._scheduler = self._manager.batch_processor.scheduler

    def stop(self) -> None:
        """End the thread, failing what is unfinished, and give the model its own attention back."""
        if self._watcher is None:
            return
        self._manager.stop(block=True, hard_stop=True)
        self._watcher.join()
        self._watcher = None
        self._model.set_attn_implementation(self._attention)

    def _watch(self, generation: threading.Thread) -> None:
        generation.join()
        self._on_death(self._manager.background_thread_status.fatal_error)

    def add(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        choice: Choice,
        deliver: Callable[[Step], None],
        native: bool = False,
    ) -> str:
        """Queue a request; ``deliver`` is called in the generation thread with each token. Returns its name.

        Args:
            native: compute the whole prompt, whatever is cached, and share nothing of it.
        """
        name = f"{NATIVE if native else 'request-'}{next(self._names)}"
        self._outbox.register(name, deliver)
        accepted = self._manager.add_request(
            list(token_ids),
            request_id=name,
            max_new_tokens=max_new_tokens,
            streaming=True,
            eos_token_id=list(stop_ids) or [-1],
            choice=choice,
        )
        if accepted is None:
            self._outbox.forget(name)
            raise EngineStoppedError("the generation thread has ended")
        return name

    def cancel(self, name: str) -> None:
        """End a request, wherever it is, and free its pages. Nothing is delivered for it afterwards."""
        self._outbox.forget(name)
        self._manager.cancel_request(name)

    @property
    def capacity(self) -> int:
        """Tokens that a single request may hold."""
        return self.pages.total * self._page_size

    def counts(self) -> dict[str, int]:
        """Gauges and counters, read without holding the thread."""
        return {
            "running": len(self._scheduler.active_requests),
            "waiting": len(self._scheduler.waiting_requests) + self._manager.input_queue.qsize(),
            "total_pages": self.pages.total,
            "free_pages": self.pages.free,
            "cached_pages": self.pages.cached,
            "prefilled_tokens": self._processors.prefilled,
            "steps": self._processors.steps,
        }


class _Outbox(OutputRouter):
    """Hands outputs to plain callbacks, in the generation thread.

    The library's own calls all handlers of a batch in the event loop of the last one, and an event loop that has
    closed meanwhile ends the generation thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[str, Callable[[Step], None]] = {}

    def register(self, name: str, deliver: Callable[[Step], None]) -> None:
        with self._lock:
            self._receivers[name] = deliver

    def forget(self, name: str) -> None:
        with self._lock:
            self._receivers.pop(name, None)

    def deliver(self, output: Any) -> None:
        finished = output.is_finished()
        with self._lock:
            find = self._receivers.pop if finished else self._receivers.get
            receive = find(output.request_id, None)
        if receive is None:
            return
        tokens = output.generated_tokens
        receive(Step(len(tokens) - 1, tokens[-1] if tokens else -1, finished, output.error))

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)


class _Chooser(ContinuousBatchingLogitsProcessor):
    """Chooses every token by its request's ``Choice``, which travels with the request as a keyword argument."""

    supported_kwargs = {"choice": Choice}  # noqa: RUF012  (declared so by the library)
    ignored_kwargs = ()

    def __init__(self) -> None:
        self._choices: list[Choice | None] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        self._choices = [request.state.logit_processor_kwargs.get("choice") for request in requests_with_new_token]
        return torch.zeros(len(self._choices), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        return choose(scores, self._choices)  # rows beyond them belong to prompts that are not yet prefilled


class _Processors(ContinuousBatchingLogitsProcessorList):
    """The chooser alone, and a count of what is prefilled."""

    def __init__(self) -> None:
        super().__init__(LogitsProcessorList([_Chooser()]))
        self.tensors_required = 1
        self.prefilled = 0
        self.steps = 0

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        self.steps += 1
        for request in requests_in_batch:
            state = request.state
            if state.generated_tokens:
                continue
            self.prefilled += request.query_length
            choice = state.logit_processor_kwargs.get("choice")
            if choice is not None and not choice.chosen:  # not again when an evicted request starts anew
                choice.prefilled += request.query_length
        return super().prepare_tensor_args(requests_in_batch, arg_storage)
