"""How the HTTP server listens and what it accepts; flags by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from leadline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one API process (serving-api 4, 10, 11, 12).

    Attributes:
        host: address to listen on.
        port: TCP port.
        served_model_name: names that requests may ask for, the first is the default; empty
            takes the checkpoint's base name.
        max_request_bytes: largest request body.
        sse_keep_alive_interval: seconds of silence before a stream gets a comment line; 0 is off.
        enable_log_requests: log the decoded prompt of every request; without it no log line
            holds text of a request.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    max_request_bytes: int = 64 * 2**20
    sse_keep_alive_interval: float = 10.0
    enable_log_requests: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}; it must lie in 0..65535 (0 takes a free one)")
        if self.max_request_bytes < 1:
            raise ConfigError(f"max_request_bytes is {self.max_request_bytes}; at least 1")
        if self.sse_keep_alive_interval < 0:
            raise ConfigError(
                f"sse_keep_alive_interval is {self.sse_keep_alive_interval}; it must be seconds, "
                "or 0 for none"
            )
