"""Answer objects of the OpenAI endpoints (serving-api 5.3, 6, 9.3, 10, 13.3)."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from leadline.core.request import TokenOutput
from leadline.core.version import __version__
from leadline.text.output_parser import ToolCallDelta

FINGERPRINT = f"leadline-{__version__}"


class PromptDetails(Struct):
    """Parts of ``prompt_tokens``."""

    cached_tokens: int = 0
    replayed_tokens: int = 0
    image_tokens: int = 0


class CompletionDetails(Struct):
    """Parts of ``completion_tokens``."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct):
    """Token counts of one answer (serving-api 13.3)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int


class UsageMeter:
    """Counts tokens over the choices of one answer; every prompt counts once."""

    def __init__(self) -> None:
        self._num_prompt = self._num_cached = self._num_replayed = 0

    def admit(self, output: TokenOutput, num_prompt_tokens: int) -> None:
        """Note the first output of a prompt's first choice."""
        self._num_prompt += num_prompt_tokens
        self._num_cached += output.num_cached_tokens
        self._num_replayed += output.num_replayed_tokens

    def usage(self, num_completion: int, num_reasoning: int = 0) -> Usage:
        """The counts so far, with those of all choices together."""
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=num_completion,
            total_tokens=self._num_prompt + num_completion,
            prompt_tokens_details=PromptDetails(self._num_cached, self._num_replayed),
            completion_tokens_details=CompletionDetails(num_reasoning),
            prompt_cache_hit_tokens=self._num_cached,
            prompt_cache_miss_tokens=self._num_prompt - self._num_cached,
        )


class TopLogprob(Struct):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A sampled token, with the most likely ones beside it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Entries of every generated token: reasoning, content and tool markup alike (9.3)."""

    content: list[TokenLogprob]


class ChatDelta(Struct, omit_defaults=True):
    """Wire form of one delta; reasoning goes by both names that clients read (C30)."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Struct):
    """``chat.completion.chunk``."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class Function(Struct):
    """Name and JSON arguments of a call."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A whole tool call."""

    id: str
    function: Function
    type: str = "function"


class ChatMessage(Struct):
    """A whole answer; keys that do not apply are absent."""

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: str = "assistant"


class ChatChoice(Struct):
    """One whole choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(Struct):
    """``chat.completion``."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class CompletionLogprobs(Struct):
    """The old layout: four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One choice of a completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def extend(self, part: CompletionChoice) -> None:
        """Append the next part of the same choice."""
        self.text += part.text
        if self.logprobs is None:
            self.logprobs = part.logprobs
        elif part.logprobs is not None:
            self.logprobs.tokens += part.logprobs.tokens
            self.logprobs.token_logprobs += part.logprobs.token_logprobs
            self.logprobs.top_logprobs += part.logprobs.top_logprobs
            self.logprobs.text_offset += part.logprobs.text_offset
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason


class Completion(Struct):
    """``text_completion``, whole or as a chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
