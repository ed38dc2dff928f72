"""From what a client sends to the specialist's own token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from deployments.request import GenerateRequest
from scd_core.errors import PromptError


def tokenise(tokenizer: Any, request: GenerateRequest) -> list[int]:
    """The prompt's ids, as the specialist's own tokenizer and chat template give them.

    Raises:
        PromptError: the prompt is empty, or the template refuses the conversation.
    """
    if request.token_ids is not None:
        ids = list(request.token_ids)
    elif request.text is not None:
        ids = tokenizer(request.text)["input_ids"]
        # some tokenizers make a lone BOS of an empty text; there is still nothing to go on
        ids = ids if request.text else []
    else:
        ids = _conversation(tokenizer, request.messages or ())
    if not ids:
        raise PromptError("the prompt is empty")
    return ids


def _conversation(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    if not messages:
        raise PromptError("the conversation is empty")
    if tokenizer.chat_template is None:
        raise PromptError("this model has no chat template: use /v1/completions")
    try:
        ids = tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise PromptError(f"this model's chat template refuses the conversation: {error}") from error
    return list(ids)
