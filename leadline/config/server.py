"""How the HTTP server listens and what it accepts; flags by vLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from leadline.config.checks import at_least, choice
from leadline.core.errors import ConfigError

# Marks fields whose values are shown to nobody, in ``--print-config`` either.
SECRET = {"secret": True}
_METRICS_PREFIX = re.compile(r"[a-zA-Z][a-zA-Z0-9_:]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How chats are rendered and answers are read (serving-api 2, 3, 5, 9).

    Attributes:
        effort_profile: texts for reasoning effort: ``auto`` (from the checkpoint), ``v4-preview``,
            ``v4`` or ``v41``.
        reasoning_parser: what other servers call the checkpoint's chat format, ``deepseek_v4`` or
            ``deepseek_v41``; another name changes nothing and is told in the log.
        tool_call_parser: the same.
        tokenizer_mode: the same, or ``hf``.
        v4_inline_system: late system messages of V4: ``hoist`` to the head, or ``reminder``.
        default_chat_template_kwargs: JSON: thinking, reasoning_effort or drop_thinking of
            requests that say nothing.
        response_format_prompt: whether the prompt tells of the response format.
        strict_tool_history: tool results and calls that do not match are an error, not repaired.
        tool_arg_coercion: arguments of a declared type that arrive as another are converted.
        tool_strict_level: least constraint on tool calls: ``auto`` (names), ``function`` or
            ``parameter`` (arguments too, as if every tool were strict).
        raw_markup: tool markup is passed through where no tools were declared.
        reasoning_field: key of reasoning: ``both``, ``reasoning_content`` or ``reasoning``.
        sampling_policy: thinking mode: ``honour`` the request, or do as ``deepseek``'s cloud.
        default_max_tokens: of chats that set none: ``deepseek``, ``remaining`` or a number.
        strict_max_tokens: a limit beyond the context is an error, not lowered.
        generation_config: where ``generation_config.json`` lies, with sampling values of requests
            that say nothing: ``auto`` is the checkpoint, ``vllm`` is nowhere, else a folder.
        override_generation_config: JSON: the same, before what that file says.
        max_logprobs: most likely tokens that may be asked for; -1 is the whole vocabulary.
        usage_in_final_chunk: usage also stands in a stream's finish chunk.
        enable_force_include_usage: usage ends every stream, asked for or not.
        stream_interval: tokens per chunk of a stream.
        enable_responses_store: keep responses in memory, for ``previous_response_id``.
    """

    effort_profile: str = "auto"
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    tokenizer_mode: str = "auto"
    v4_inline_system: str = "hoist"
    default_chat_template_kwargs: dict[str, Any] | None = None
    response_format_prompt: bool = True
    strict_tool_history: bool = False
    tool_arg_coercion: bool = True
    tool_strict_level: str = "auto"
    raw_markup: bool = False
    reasoning_field: str = "both"
    sampling_policy: str = "honour"
    default_max_tokens: str = "deepseek"
    strict_max_tokens: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    max_logprobs: int = 20
    usage_in_final_chunk: bool = False
    enable_force_include_usage: bool = False
    stream_interval: int = 1
    enable_responses_store: bool = False

    def __post_init__(self) -> None:
        choice(self, "effort_profile", "auto", "v4-preview", "v4", "v41")
        choice(self, "v4_inline_system", "hoist", "reminder")
        choice(self, "tool_strict_level", "auto", "function", "parameter")
        choice(self, "reasoning_field", "both", "reasoning_content", "reasoning")
        choice(self, "sampling_policy", "honour", "deepseek")
        if not self.default_max_tokens.isdecimal():
            choice(self, "default_max_tokens", "deepseek", "remaining")
        at_least(self, -1, "max_logprobs")
        at_least(self, 1, "stream_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may ask, how much, and from which pages (serving-api 11, 12, 13.2).

    Attributes:
        api_key: keys that clients may use; without any, every key is taken.
        api_key_file: a file with one key a line.
        admin_api_key: key of the admin endpoints.
        enable_admin_endpoints: serve reset of the prefix cache, pause and resume.
        protect_metrics: metrics need a key too.
        rate_limit_rpm: requests a minute of one key.
        rate_limit_tpm: tokens a minute of one key, prompt and answer.
        max_concurrency_per_key: requests of one key at the same time.
        cache_isolation: who shares cached prefixes: ``none`` (all), ``api-key`` or ``user``.
        cors: every page may ask, without credentials.
        allowed_origins: JSON list of the pages that may ask.
        allowed_methods: JSON list of methods for them.
        allowed_headers: JSON list of headers for them.
        allow_credentials: they may send cookies and keys of the browser.
    """

    api_key: tuple[str, ...] = field(default=(), metadata=SECRET)
    api_key_file: str | None = None
    admin_api_key: str | None = field(default=None, metadata=SECRET)
    enable_admin_endpoints: bool = False
    protect_metrics: bool = False
    rate_limit_rpm: int | None = None
    rate_limit_tpm: int | None = None
    max_concurrency_per_key: int | None = None
    cache_isolation: str = "none"
    cors: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        choice(self, "cache_isolation", "none", "api-key", "user")
        at_least(self, 1, "rate_limit_rpm", "rate_limit_tpm", "max_concurrency_per_key")
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("an api_key is empty: requests without a key would fit it")
        if self.enable_admin_endpoints and not self.admin_api_key:
            raise ConfigError(
                "enable_admin_endpoints needs an admin_api_key: who may use the model must not be "
                "able to pause it for everybody"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Encryption (serving-api 12).

    Attributes:
        ssl_certfile: certificate; with it the server speaks TLS 1.2 or later.
        ssl_keyfile: its key.
        ssl_ca_certs: authorities of client certificates.
        ssl_cert_reqs: client certificates: 0 none, 1 optional, 2 required.
        ssl_ciphers: OpenSSL's list of ciphers.
        enable_ssl_refresh: read certificates again when their files change.
    """

    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    enable_ssl_refresh: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            if self.ssl_certfile is None and getattr(self, f.name) != f.default:
                raise ConfigError(f"{f.name} is given without ssl_certfile, which turns TLS on")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs is {self.ssl_cert_reqs!r}; it must be 0, 1 or 2")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs is {self.ssl_cert_reqs} without ssl_ca_certs: no certificate of a "
                "client could be trusted"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Logs, metrics and traces (serving-api 14).

    Attributes:
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``text``, or ``json`` with one object a line.
        enable_log_requests: log prompt texts; without it no log line holds text of a request.
        enable_log_outputs: log the texts of answers.
        metrics_prefix: of the metrics that vLLM has too.
        otlp_traces_endpoint: URL that OpenTelemetry traces are sent to.
    """

    log_level: str = "info"
    log_format: str = "text"
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    metrics_prefix: str = "vllm:"
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        choice(self, "log_level", "debug", "info", "warning", "error")
        choice(self, "log_format", "text", "json")
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix is {self.metrics_prefix!r}; it takes letters, digits, _ and :, "
                "and begins with a letter, such as vllm:"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one API process (serving-api 4, 10, 11, 12).

    Attributes:
        host: address to listen on.
        port: TCP port.
        uds: Unix socket to listen on instead.
        root_path: path under which a proxy offers the server.
        forwarded_allow_ips: addresses of proxies whose X-Forwarded headers are believed,
            comma-separated; * believes all.
        served_model_name: names that requests may ask for, the first is the default; empty
            takes the checkpoint's base name.
        model_alias: further names, each as NAME=SERVED.
        max_request_bytes: largest request body.
        scheduling_policy: ``fcfs`` serves who came first; with ``priority`` requests may name one,
            smaller is earlier.
        request_timeout: seconds until an unfinished request ends; None is no limit.
        stream_write_timeout: seconds that a stream's reader may stand still.
        sse_keep_alive_interval: seconds of silence before a stream gets a comment line; 0 is off.
        drain_delay: seconds after SIGTERM in which the port stays open for load balancers.
        shutdown_timeout: seconds that running requests get then to end.
        watchdog_timeout: seconds without a step, while requests run, until the server says that
            it is not healthy.
        auto_restart: start the engine process again when it dies; without it the server ends.
        session_affinity_headers: headers that name a session.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    forwarded_allow_ips: str = "127.0.0.1"
    served_model_name: tuple[str, ...] = ()
    model_alias: tuple[str, ...] = ()
    max_request_bytes: int = 64 * 2**20
    scheduling_policy: str = "fcfs"
    request_timeout: float | None = None
    stream_write_timeout: float = 60.0
    sse_keep_alive_interval: float = 10.0
    drain_delay: float = 5.0
    shutdown_timeout: float = 30.0
    watchdog_timeout: float = 300.0
    auto_restart: bool = False
    session_affinity_headers: tuple[str, ...] = (
        "x-claude-code-session-id",
        "session_id",
        "session-id",
        "conversation_id",
    )
    chat: ChatConfig = field(default_factory=ChatConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}; it must lie in 0..65535 (0 takes a free one)")
        choice(self, "scheduling_policy", "fcfs", "priority")
        at_least(self, 1, "max_request_bytes")
        at_least(self, 0, "request_timeout", "stream_write_timeout", "sse_keep_alive_interval")
        at_least(self, 0, "drain_delay", "shutdown_timeout", "watchdog_timeout")
        for alias in self.model_alias:
            if "=" not in alias:
                raise ConfigError(f"model_alias is {alias!r}; write NAME=SERVED")


def shown(config: Any) -> dict[str, Any]:
    """A configuration tree as plain values; secrets that are set read ``***``."""
    values: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            value = shown(value)
        elif value and f.metadata.get("secret"):
            value = "***"
        values[f.name] = value
    return values
