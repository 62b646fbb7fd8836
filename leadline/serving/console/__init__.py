"""The page at ``GET /``: chat and live gauges, by the public API alone.

Plain files without a build step; nothing is fetched from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked about: an upgrade shows at once
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_STATIC = files(__name__) / "static"
_FILES = {
    "/" if file.name == "index.html" else f"/console/{file.name}": file.name
    for file in _STATIC.iterdir()
}

CONSOLE_PATHS = frozenset(_FILES)


def console_routes() -> list[Route]:
    """``/`` and the files that it uses, ``CONSOLE_PATHS``: they need no key, the API does."""
    return [Route(path, _serve(name), include_in_schema=False) for path, name in _FILES.items()]


def _serve(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (_STATIC / name).read_bytes()
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
    media_type = _TYPES[name.rpartition(".")[2]]

    async def console(http: Request) -> Response:
        if http.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return console
