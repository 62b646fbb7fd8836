"""Who may ask: API keys in three header forms, and what is open to everybody (serving-api 12)."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from leadline.config.server import AccessConfig
from leadline.core.errors import ConfigError
from leadline.serving.console import CONSOLE_PATHS

PROBES = frozenset({"/health", "/ping", "/version", "/load", "/metrics"})
_ADMIN = frozenset({"/reset_prefix_cache", "/pause", "/resume"})


class KeyRing:
    """The keys that are taken; only their digests are kept.

    Raises:
        ConfigError: the file of keys cannot be read or holds none.
    """

    def __init__(self, config: AccessConfig) -> None:
        keys = [*config.api_key, *_keys_of(config.api_key_file)]
        self._users = [_digest(key.encode()) for key in keys]
        self._admins = [_digest(key.encode()) for key in (config.admin_api_key,) if key]

    @property
    def is_empty(self) -> bool:
        """Whether every key is taken because none was configured."""
        return not self._users

    def check(self, headers: Headers, *, admin: bool) -> str:
        """A name for the key of a request that says nothing of the key; empty without one.

        Raises:
            HTTPException: 401 without a good key, 403 where only the admin's will do.
        """
        sent = _sent_key(headers)
        digest = _digest(sent.encode("latin-1"))  # the bytes as they came
        # Every key is compared, whichever fits: the time tells nothing.
        is_admin = sum(hmac.compare_digest(digest, good) for good in self._admins) > 0
        is_user = sum(hmac.compare_digest(digest, good) for good in self._users) > 0
        if not (is_admin or is_user or (self.is_empty and not admin)):
            raise HTTPException(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, "
                "x-api-key or api-key",
                {"WWW-Authenticate": "Bearer"},
            )
        if admin and not is_admin:
            raise HTTPException(403, "this endpoint needs the admin's key")
        return digest.hex()[:16] if sent else ""


class Access:
    """ASGI middleware that lets only good keys through; ``state.key`` names the key.

    Everything needs a key but the probes: a new endpoint is closed unless it is listed here.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, config: AccessConfig) -> None:
        self._app = app
        self._keys = keys
        closed = {"/metrics"} if config.protect_metrics else set()
        self._open = (PROBES | CONSOLE_PATHS) - closed
        self._admin = _ADMIN if config.enable_admin_endpoints else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = local_path(scope)
        key = ""
        if path not in self._open and scope["method"] != "OPTIONS":
            key = self._keys.check(Headers(scope=scope), admin=path in self._admin)
        scope["state"]["key"] = key
        await self._app(scope, receive, send)


def local_path(scope: Scope) -> str:
    """The path below ``--root-path``, as routes name it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _sent_key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key") or headers.get("api-key") or ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _keys_of(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file is {file!r}, which cannot be read: {error}") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file is {file!r}, which holds no key; write one a line")
    return keys
