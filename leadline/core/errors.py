"""Errors by whose fault they are: the type says who has to act.

``ConfigError``, ``CheckpointError`` and ``BadRequest`` are other people's mistakes and carry one
message that says what, where and what to do. ``OutOfPages`` and ``OutOfSlots`` are states that the
scheduler handles. Our own mistakes are assertions.
"""


class LeadlineError(Exception):
    """Base of every error that Leadline raises on purpose."""


class ConfigError(LeadlineError):
    """A configuration file, flag or argument that cannot be used."""


class CheckpointError(LeadlineError):
    """A checkpoint file that does not hold what its configuration promises."""


class BadRequest(LeadlineError):
    """A request that can never be served as it stands.

    Attributes:
        param: the field that is wrong, as the client spelled its path, or None.
        code: a short machine-readable code of ``serving-api`` section 11.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def prompt_too_long(num_tokens: int, max_model_len: int, *, param: str) -> BadRequest:
    """The error of a prompt that leaves no room for a token, over HTTP and offline (C54)."""
    # Agents of every dialect look for these words to begin compaction.
    return BadRequest(
        f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum; this model's "
        f"maximum context length is {max_model_len} tokens and the answer needs at least one; "
        f"shorten {param}",
        param=param,
        code="context_length_exceeded",
    )


class EngineOverloaded(LeadlineError):
    """The engine refuses work for now: the queue is full, it is paused or it shuts down.

    Attributes:
        code: ``server_overloaded``, ``shutting_down`` or ``not_ready``.
        retry_after: seconds after which it may be worth trying again.
    """

    def __init__(
        self, message: str, *, code: str = "server_overloaded", retry_after: float = 1.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class RequestTimeout(LeadlineError):
    """A request's deadline passed before it ended."""


class EngineDead(LeadlineError):
    """The engine process ended; open and later requests fail with this."""


class NotSupported(LeadlineError):
    """A feature that does not exist yet; the message names it."""


class OutOfPages(LeadlineError):
    """No free page is left; the scheduler waits or preempts."""


class OutOfSlots(LeadlineError):
    """No free slot is left; the scheduler waits."""
