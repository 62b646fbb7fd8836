"""How much one key may ask: requests and tokens a minute, requests at once (serving-api 12)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from leadline.config.server import AccessConfig
from leadline.core.errors import LeadlineError

MINUTE = 60.0


class RateLimited(LeadlineError):
    """One key asks for more than its share; others are served.

    Attributes:
        retry_after: seconds until it may ask again.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(slots=True)
class Bucket:
    """An allowance that refills evenly over a minute, up to one minute's worth.

    Attributes:
        level: what is left; below zero when more was used than was there.
    """

    per_minute: int
    now: float
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = float(self.per_minute)

    def refill(self, now: float) -> None:
        """Add what has come since the last call."""
        gained = (now - self.now) * self.per_minute / MINUTE
        self.level, self.now = min(self.per_minute, self.level + gained), now

    def seconds_until(self, level: float) -> float:
        """How long it takes to refill to ``level``."""
        return max(0.0, (level - self.level) * MINUTE / self.per_minute)


class KeyLimits:
    """What one key has used.

    Attributes:
        num_open: its requests that run now; whoever runs them counts.
    """

    def __init__(self, config: AccessConfig, now: float) -> None:
        self.num_open = 0
        self.max_open = config.max_concurrency_per_key
        self.buckets: dict[str, Bucket] = {}
        for name, limit in (
            ("requests", config.rate_limit_rpm),
            ("tokens", config.rate_limit_tpm),
        ):
            if limit is not None:
                self.buckets[name] = Bucket(limit, now)

    def check(self, now: float) -> None:
        """Look whether one more request may start.

        Raises:
            RateLimited: there is no room for it.
        """
        if self.max_open is not None and self.num_open >= self.max_open:
            raise RateLimited(
                f"{self.num_open} requests of this key are running, and no more than "
                f"{self.max_open} may; try again when one has ended",
                retry_after=1.0,
            )
        for name, bucket in self.buckets.items():
            bucket.refill(now)
            # Tokens are known at the end only: a request may start while any are left.
            if bucket.level < 1:
                raise RateLimited(
                    f"this key has used its {bucket.per_minute} {name} a minute",
                    retry_after=bucket.seconds_until(1),
                )

    def start(self, now: float) -> None:
        """Take one more request off the allowance; raises as ``check`` does."""
        self.check(now)
        if "requests" in self.buckets:
            self.buckets["requests"].level -= 1

    def charge(self, num_tokens: int) -> None:
        """Take tokens of the prompt and the answer off the allowance."""
        if "tokens" in self.buckets:
            self.buckets["tokens"].level -= num_tokens

    def headers(self, now: float) -> Iterator[tuple[bytes, bytes]]:
        """``x-ratelimit-*`` of each limit, by OpenAI's names."""
        for name, bucket in self.buckets.items():
            bucket.refill(now)
            values = {
                "limit": str(bucket.per_minute),
                "remaining": str(max(0, math.floor(bucket.level))),
                "reset": f"{bucket.seconds_until(bucket.per_minute):.3f}s",
            }
            for what, value in values.items():
                yield f"x-ratelimit-{what}-{name}".encode(), value.encode()


class RateLimiter:
    """The limits of every key.

    Args:
        config: the limits.
        per_key: False where no keys are configured: then all callers share one allowance, since
            anybody could invent another key.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: AccessConfig,
        *,
        per_key: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = clock
        self._config = config
        self._per_key = per_key
        self._keys: dict[str, KeyLimits] = {}

    def of(self, key: str) -> KeyLimits:
        """The limits of the key of this name."""
        name = key if self._per_key else ""
        if name not in self._keys:
            self._keys[name] = KeyLimits(self._config, self.now())
        return self._keys[name]
