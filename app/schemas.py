"""What clients may send. Whatever would change the answer and is not supported is refused by name.

Convention: None means absent, as in OpenAI's clients, which send it. A parameter that is not supported is accepted
with the one value that changes nothing (``n: 1``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.errors import invalid
from scd_core.sampling import SamplingParams

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Parameters that are not supported, and the values with which they are accepted."""

IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Parameters that do not change the answer."""

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 512
SEED_LIMIT = 2**63


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _none_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(_Strict):
    """Of a stream."""

    include_usage: bool = False


class ScdOptions(_Strict):
    """This project's own field: say where the tokens came from; do without codes."""

    usage: bool = False
    codes: bool = True


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it: text in one piece."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({"name": self.name} if self.name else {})}


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class GenerationBody(_Strict):
    """What both endpoints take."""

    prompt_param: ClassVar[str]

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = Field(default=None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    scd: ScdOptions = Field(default_factory=ScdOptions)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in IGNORED or (name in NEUTRAL and any(_same(value, v) for v in NEUTRAL[name])):
                continue
            kept[name] = value
        return kept

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """As the engine takes it."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            logprobs=logprobs,
            ignore_eos=self.ignore_eos,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt_param: ClassVar[str] = "prompt"

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def params(self) -> SamplingParams:
        return self.sampling(self.max_tokens or 16, self.logprobs)

    def single_prompt(self) -> str | list[int]:
        """The one prompt.

        Raises:
            ApiError: there is none, or there are several.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise invalid("Only one prompt per request is supported", "prompt", "unsupported_value")
            prompt = prompt[0]
        if not prompt:
            raise invalid("The prompt is empty", "prompt", "invalid_prompt")
        return prompt if isinstance(prompt, str) else list(prompt)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    prompt_param: ClassVar[str] = "messages"

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def params(self) -> SamplingParams:
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return self.sampling(min(limits, default=None), (self.top_logprobs or 0) if self.logprobs else None)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
