"""Answer objects of the OpenAI endpoints (serving-api 5.3, 6, 10, 13.3)."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from leadline.core.version import __version__
from leadline.serving.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from leadline.serving.usage import TokenCounts

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
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int

    @classmethod
    def of(cls, counts: TokenCounts) -> Usage:
        """The counts under OpenAI's and DeepSeek's names."""
        return cls(
            prompt_tokens=counts.prompt,
            completion_tokens=counts.completion,
            total_tokens=counts.prompt + counts.completion,
            prompt_tokens_details=PromptDetails(counts.cached, counts.replayed),
            completion_tokens_details=CompletionDetails(counts.reasoning),
            prompt_cache_hit_tokens=counts.cached,
            prompt_cache_miss_tokens=counts.prompt - counts.cached,
        )


class FunctionDelta(Struct, omit_defaults=True):
    """Name (in a call's first delta) and a fragment of the arguments."""

    arguments: str
    name: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """A piece of one tool call; id and type come with the first."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(Struct, omit_defaults=True):
    """One delta of a stream: the role, or one kind of payload."""

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
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """``chat.completion.chunk``."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
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
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """``chat.completion``."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    object: str = "chat.completion"


class CompletionChoice(Struct):
    """One choice of a completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET

    def extend(self, part: CompletionChoice) -> None:
        """Append the next part of the same choice."""
        self.text += part.text
        if self.logprobs is None:
            self.logprobs = part.logprobs
        elif part.logprobs is not None:
            self.logprobs.extend(part.logprobs)
        if part.prompt_logprobs is not UNSET:
            self.prompt_logprobs = part.prompt_logprobs
        if part.prompt_token_ids is not UNSET:
            self.prompt_token_ids = part.prompt_token_ids
        if self.token_ids is UNSET:
            self.token_ids = part.token_ids
        elif part.token_ids is not UNSET:
            self.token_ids += part.token_ids
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
