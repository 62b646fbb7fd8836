"""Whose request it is, as far as the body says it (serving-api 13)."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from leadline.core.errors import BadRequest
from leadline.core.request import Constraint, EngineRequest, SamplingParams, ThinkingBudget
from leadline.serving.context import Caller

_CACHE_SALT = re.compile(r"[^@/\\\0]{1,128}")
_MAX_USER_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Fields of a body that decide where a request runs and whose cache it shares.

    Attributes:
        priority: smaller runs earlier.

    Raises:
        BadRequest: a salt or a user outside its domain (13.2).
    """

    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        salt = self.cache_salt
        if salt is not None and not _CACHE_SALT.fullmatch(salt):
            raise BadRequest(
                f"cache_salt is {salt[:128]!r}; it must have 1 to 128 characters, none "
                "of them @, /, a backslash or NUL",
                param="cache_salt",
            )
        if self.user is not None and (size := len(self.user.encode())) > _MAX_USER_BYTES:
            raise BadRequest(
                f"user_id has {size} bytes; at most {_MAX_USER_BYTES} are allowed", param="user_id"
            )

    def salt(self, caller: Caller) -> str | None:
        """Who shares cached prefixes and remembered turns with this request."""
        return caller.cache_salt(self.cache_salt, self.user)

    def engine_request(
        self,
        caller: Caller,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        constraint: Constraint | None = None,
        bad_token_ids: tuple[tuple[int, ...], ...] = (),
        thinking_budget: ThinkingBudget | None = None,
    ) -> EngineRequest:
        """What the engine is asked for, under an id of its own (C56).

        Answers are called by it too, so that a line of the log leads to its answer.

        Raises:
            BadRequest: a priority where the server takes none (serving-api 5.1).
        """
        if self.priority and not caller.may_hurry:
            raise BadRequest(
                f"priority is {self.priority}, but this server serves requests in their order; "
                "leave it out, or start the server with --scheduling-policy priority",
                param="priority",
            )
        return EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            priority=self.priority,
            session_key=caller.session_key(
                session_id=self.session_id, prompt_cache_key=self.prompt_cache_key, user=self.user
            ),
            cache_salt=self.salt(caller),
            timeout_seconds=caller.timeout_seconds,
            constraint=constraint,
            bad_token_ids=bad_token_ids,
            thinking_budget=thinking_budget,
        )
