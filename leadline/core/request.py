"""What a request is, on both sides of the process boundary: parameters, outputs, live state."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from leadline.core.errors import BadRequest


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the content of an answer must look like; exactly one is set (serving-api 9.4).

    Attributes:
        json: a JSON schema, as an object or as its text.
        regex: the whole content matches it.
        choice: the content is one of these strings.
        grammar: EBNF, in Lark's or GBNF's notation.
        json_object: any JSON object.
        structural_tag: texts that begin and end a constrained part, as vLLM spells them.
    """

    json: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if self.json is False:  # a schema too: nothing is allowed
            given.append("json")
        if len(given) != 1:
            names = ", ".join(given) or "nothing"
            raise BadRequest(
                "structured_outputs takes exactly one of json, regex, choice, grammar, "
                f"json_object and structural_tag; it has {names}",
                param="structured_outputs",
            )


@dataclass(frozen=True, slots=True)
class Constraint:
    """Grammars that the engine enforces on generated tokens, in ``llguidance``'s Lark notation.

    Attributes:
        at_once: holds from the first token on; None leaves tokens free until a trigger.
        after: (trigger id, grammar) pairs: nothing is masked until one of the ids is generated;
            its grammar then holds for the tokens that follow, to the end of the answer. Once a
            grammar holds, further triggers are tokens like others.
    """

    at_once: str | None = None
    after: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After ``num_tokens`` generated tokens without ``end_id``, that id is forced.

    ``num_tokens`` is at least 0; what follows the first ``end_id`` is free.
    """

    num_tokens: int
    end_id: int


# Entries of one list of ids or words: the sampler looks at each of them at every step.
MAX_LISTED = 4096


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a request ends; names, domains and defaults as vLLM's.

    Order of operations (serving-api 9.1): logit bias and allowed or bad tokens, grammar,
    penalties, temperature, min_p, top_k, top_p, draw.

    Attributes:
        temperature: 0 is greedy (values below 1e-5 count as 0).
        top_k: 0 or -1 is off.
        seed: signed 64-bit; None draws from the engine's own seed.
        max_tokens: at least 1; 0 only together with ``prompt_logprobs``, to score a prompt.
        stop: strings searched in the text by the detokenizer, never by the engine.
        stop_token_ids: ids that end a request in the engine, beside the model's end token.
        logprobs: None is off; n returns the sampled token and the n most likely; -1 all.
        prompt_logprobs: the same for the prompt's tokens; it turns prefix reuse off.
        logit_bias: id -> additive bias, applied before temperature.
        bad_words: texts whose tokens are never completed; the tokenizer's side turns them into
            ``EngineRequest.bad_token_ids``.
        thinking_token_budget: reasoning tokens before the end of reasoning is forced; -1 is no
            limit. Becomes ``EngineRequest.thinking_budget``.
        structured_outputs: becomes ``EngineRequest.constraint``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    thinking_token_budget: int = -1
    structured_outputs: StructuredOutputs | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _check_number(self, "temperature", 0.0, 2.0)
        _check_number(self, "top_p", 0.0, 1.0, exclusive_low=True)
        _check_number(self, "min_p", 0.0, 1.0)
        _check_number(self, "presence_penalty", -2.0, 2.0)
        _check_number(self, "frequency_penalty", -2.0, 2.0)
        _check_number(self, "repetition_penalty", 0.0, math.inf, exclusive_low=True)
        _check_integer(self, "top_k", -1, None)
        _check_integer(self, "max_tokens", 0, None)
        _check_integer(self, "min_tokens", 0, None)
        _check_integer(self, "n", 1, 128)
        _check_integer(self, "thinking_token_budget", -1, None)
        if self.seed is not None:
            _check_integer(self, "seed", -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(self, name, -1, None)
        if self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if len(self.stop) > 16 or any(not s for s in self.stop):
            raise BadRequest("stop takes at most 16 strings, none of them empty", param="stop")
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words"):
            if (count := len(getattr(self, name) or ())) > MAX_LISTED:
                raise BadRequest(
                    f"{name} has {count} entries; at most {MAX_LISTED} are allowed", param=name
                )
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise BadRequest(
                    f"logit_bias of token {token} is {bias}; it must lie in -100..100",
                    param="logit_bias",
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    def choice(self, index: int) -> SamplingParams:
        """Of one of the ``n`` choices: ``n`` = 1, seed ``seed + index`` (serving-api 9.1)."""
        if self.seed is None:
            return replace(self, n=1)
        seed = (self.seed + index + 2**63) % 2**64 - 2**63  # stays a signed 64-bit number
        return replace(self, n=1, seed=seed)


def _check_number(
    params: SamplingParams, name: str, low: float, high: float, *, exclusive_low: bool = False
) -> None:
    value = getattr(params, name)
    good = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
        and not (exclusive_low and value == low)
    )
    if not good:
        span = f"{'(' if exclusive_low else '['}{low:g}, {high:g}]"
        raise BadRequest(f"{name} is {value!r}; it must be a number in {span}", param=name)


def _check_integer(params: SamplingParams, name: str, low: int, high: int | None) -> None:
    value = getattr(params, name)
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise BadRequest(f"{name} is {value!r}; it must be an integer {limit}", param=name)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What crosses into the engine process: ids, never text.

    Attributes:
        request_id: unique within the engine while the request lives.
        prompt_token_ids: at least one id, each below the vocabulary size.
        priority: smaller runs earlier.
        session_key: affinity and fairness key, or None.
        cache_salt: only requests of the same salt share cached prefixes.
        timeout_seconds: the request ends with ``TIMEOUT`` when it has not ended this long after
            its arrival.
        constraint: what the answer must look like.
        bad_token_ids: sequences of ids that the answer never completes.
        thinking_budget: when reasoning is cut short.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    session_key: str | None = None
    cache_salt: str | None = None
    timeout_seconds: float | None = None
    constraint: Constraint | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    thinking_budget: ThinkingBudget | None = None

    def choices(self) -> list[EngineRequest]:
        """One request for each of the ``n`` choices; their ids are this one's and a number."""
        return [
            replace(self, request_id=f"{self.request_id}-{i}", sampling=self.sampling.choice(i))
            for i in range(self.sampling.n)
        ]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one sampled token (before temperature and masks) and its rivals.

    Attributes:
        top: ``(token id, logprob)`` pairs, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What the engine says about one request after a step in which it got tokens or ended.

    Attributes:
        token_ids: the new tokens of this step, possibly none when the request only ends.
        stop_token_id: the id that ended the request, when a stop id did.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_replayed_tokens: cached tokens that were fed again to rebuild windows.
        queue_seconds: from arrival to the first admission.
        prompt_logprobs: with the first output of a request that asked: one entry per prompt
            token, the first of them None.
        error: the message, when ``finish_reason`` is ERROR or TIMEOUT.
        refusal: why a request that had been taken can never be served after all (its grammar
            does not compile); raised by ``EngineClient.submit``'s iterator.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    num_replayed_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    error: str | None = None
    refusal: BadRequest | None = None


class RequestState(enum.Enum):
    """Where a request stands in the scheduler (cache-and-scheduling 5.1)."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHED = enum.auto()


class SnapshotKind(enum.Enum):
    """Why a snapshot is taken (cache-and-scheduling 2.8)."""

    INTERVAL = enum.auto()
    JUNCTION = enum.auto()
    PROMPT_END = enum.auto()
    TURN_END = enum.auto()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A saved slot: the private state of a request at a page boundary (cache-and-scheduling 1.3).

    Attributes:
        slot: the row of the slot tensors that holds it, beyond the rows of requests.
        boundary: the tokens that it stands behind, whole pages.
        floor_lo: first position that has window KV in the lower layers.
        floor_up: the same for the upper layers.
    """

    slot: int
    boundary: int
    floor_lo: int
    floor_up: int
    kind: SnapshotKind


class LiveConstraint(Protocol):
    """A ``Constraint`` after all tokens that it has accepted (``engine.constraint``).

    Attributes:
        matcher: ``llguidance``'s, of the grammar that holds for the next token; None while
            tokens are free.
        is_complete: nothing may follow but the end.
        error: why the grammar failed, if it did.
    """

    @property
    def matcher(self) -> Any: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by generated tokens."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """A live request inside the engine (cache-and-scheduling 8.2).

    Attributes:
        tokens: prompt and output ids, oldest first.
        pages: page ids of positions ``[0, 256 * len(pages))``.
        slot: the slot id, 0 (the padding slot) while it has none.
        cached: H, tokens whose global KV came from the prefix cache at admission.
        floor_lo: s, first position that has window KV in the lower layers.
        floor_up: U, first position that has window KV in the upper layers.
        prefill_end: E, the tokens known when prefill was entered.
        fed: next position to feed; rows below it may still be in flight.
        confirmed: c, positions whose step has been booked.
        in_flight: sampled tokens of steps that are not booked yet.
        generation: grows when the request ends, is preempted, or has rows fed again, so that late
            results are seen.
        short_at: the last position of which a step of one row did not fit into memory.
        junction: where the cached prefix ended at admission, when no snapshot allowed its use.
        num_cached_tokens: prompt tokens found in the cache at the first admission.
        num_replayed_tokens: of these, the ones that were fed again then.
        queue_seconds: from arrival to the first admission; 0 before it.
        deadline: the clock's seconds at which it fails, or None.
        num_bypassed: times that later requests were admitted past this waiting one.
        seed: of its random draws, the client's or one that the engine drew.
        wants_prompt_logits: every prompt row's logits are returned and nothing is sampled.
        prompt_logprobs: those known so far where they are asked for; None once they were told.
        is_deferred: its grammar is being compiled, and it cannot run before.
        constraint: what its tokens must look like, after all of its output so far.
        bad_token_ids: sequences of ids that its output never completes.
        thinking_budget: when reasoning is cut short; None once the end of reasoning has come.
        cache_salt: only requests of the same salt share cached prefixes.
        page_extras: page index -> hashes and offsets of the images in it.
        digests: chained digests of the first full pages of ``tokens``; grown when needed.
        digest_root: what the chain starts from; empty until it is known.
        committed: pages of ``pages`` that are full, confirmed and known to the prefix index.
        pending_snapshots: taken, but not attached to a page of the prefix index yet.
    """

    request_id: str
    tokens: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    session_key: str | None = None
    wants_prompt_logits: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    is_deferred: bool = False
    constraint: LiveConstraint | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    thinking_budget: ThinkingBudget | None = None
    state: RequestState = RequestState.WAITING
    pages: array[int] = field(default_factory=lambda: array("i"))
    slot: int = 0
    cached: int = 0
    floor_lo: int = 0
    floor_up: int = 0
    prefill_end: int = 0
    fed: int = 0
    confirmed: int = 0
    in_flight: int = 0
    generation: int = 0
    short_at: int = -1
    junction: int = 0
    num_cached_tokens: int = 0
    num_replayed_tokens: int = 0
    queue_seconds: float = 0.0
    deadline: float | None = None
    num_preemptions: int = 0
    num_bypassed: int = 0
    seed: int = 0
    cache_salt: str | None = None
    page_extras: Mapping[int, bytes] = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)
    digest_root: bytes = b""
    committed: int = 0
    pending_snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def reads_prompt(self) -> bool:
        """Whether the logits of every prompt row are wanted, so that none may be skipped."""
        return self.wants_prompt_logits or self.prompt_logprobs is not None

    def append(self, token_id: int) -> None:
        """Book a generated token; what follows is decided by all tokens up to it."""
        self.tokens.append(token_id)
        if self.constraint is not None:
            self.constraint.accept([token_id])
        if self.thinking_budget is not None and token_id == self.thinking_budget.end_id:
            self.thinking_budget = None
