"""OpenTelemetry traces, where ``--otlp-traces-endpoint`` asks for them (serving-api 14).

The packages are optional and imported only then. Attribute names are those that vLLM's traces
have; no text of a request is among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from leadline.core.errors import ConfigError
from leadline.core.request import EngineRequest
from leadline.core.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_TRACES_PATH = "/v1/traces"


class Tracer:
    """Sends a span for each request to a collector.

    Args:
        endpoint: URL of an OTLP collector over HTTP; ``/v1/traces`` is added to a bare host.

    Raises:
        ConfigError: the packages are missing, or the URL is none.
    """

    def __init__(self, endpoint: str) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r}; write a URL such as http://localhost:4318"
            )
        if url.path in ("", "/"):
            endpoint = url._replace(path=_TRACES_PATH).geturl()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs the package {error.name}; "
                "install them with pip install 'leadline[otel]'"
            ) from error
        resource = Resource.create({"service.name": "leadline", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("leadline", __version__)

    def start(self, request: EngineRequest, log_id: str) -> Span:
        """Begin the span of a request that is about to be submitted."""
        from opentelemetry.trace import SpanKind

        sampling = request.sampling
        return self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.request.id": log_id,
                "gen_ai.response.id": request.request_id,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.n": sampling.n,
                "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            },
        )

    @contextmanager
    def continued(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Spans that begin inside belong to the trace that ``traceparent`` names."""
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        token = context.attach(TraceContextTextMapPropagator().extract(headers))
        try:
            yield
        finally:
            context.detach(token)

    def flush(self) -> None:
        """Send what is still held back."""
        self._provider.force_flush()


class TraceParent:
    """Middleware that lets the spans of a request continue its caller's trace."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope.get("headers", ())
            if name in (b"traceparent", b"tracestate")
        }
        with self._tracer.continued(headers):
            await self._app(scope, receive, send)
