"""Log lines: one for each request, with values, and no text unless asked for (serving-api 14)."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from leadline.config.server import TelemetryConfig
from leadline.serving.logs import Event, JsonFormatter, configure_logging
from tests.serving.conftest import HELLO, MakeRig

CHAT = "/v1/chat/completions"


def finished(caplog: pytest.LogCaptureFixture) -> list[Event]:
    events = [r.msg for r in caplog.records if isinstance(r.msg, Event)]
    return [event for event in events if event.name == "finished"]


def test_each_request_leaves_one_line_with_its_counts(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = rig("a</think>b")
    server.engine.num_cached_tokens = 3
    server.http.post(CHAT, json={"messages": HELLO, "n": 2}, headers={"X-Request-Id": "mine"})
    first, second = finished(caplog)
    assert first.fields["id"] != second.fields["id"]
    assert first.fields.keys() == {
        "request_id",
        "id",
        "reason",
        "prompt_tokens",
        "cached_tokens",
        "replayed_tokens",
        "output_tokens",
        "total_seconds",
        "queue_seconds",
        "first_token_seconds",
    }
    assert (
        first.fields.items()
        >= {
            "request_id": "mine",
            "reason": "stop",
            "cached_tokens": 3,
            "output_tokens": 4,
        }.items()
    )


@pytest.mark.parametrize("flag", [None, "enable_log_requests", "enable_log_outputs"], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_item_95_no_text_and_no_key_at_info_unless_asked(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, flag: str | None, stream: bool
) -> None:
    caplog.set_level("INFO")
    server = rig("secretly</think>said", **({flag: True} if flag else {}))
    body = {"messages": [{"role": "user", "content": "mysterious"}], "stream": stream}
    for key in ("authorization", "x-api-key", "api-key"):
        server.http.post(CHAT, json=body, headers={key: "Bearer k3y-of-mine"})
    server.http.post(CHAT, json=body | {"temperature": "mysterious"})
    server.http.post(CHAT, content=b'{"messages": "mysterious" said')
    server.http.get("/metrics")
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert ("mysterious" in text) == (flag == "enable_log_requests")
    assert ("secretly" in text, "said" in text) == ((flag == "enable_log_outputs"),) * 2
    assert "k3y" not in text
    assert len(finished(caplog)) == 3


def test_text_of_an_event_stays_on_one_line() -> None:
    event = Event("prompt", {"id": "a-1", "text": "two\nlines", "seconds": 0.12345, "n": 2})
    assert str(event) == "prompt id=a-1 text='two\\nlines' seconds=0.123 n=2"


def test_json_lines_carry_the_values_and_the_traceback() -> None:
    formatter = JsonFormatter()
    event = Event("finished", {"reason": "stop", "total_seconds": 0.5})
    record = logging.makeLogRecord({"name": "leadline", "levelname": "INFO", "msg": event})
    record.created, record.msecs = 0.25, 250.0
    assert json.loads(formatter.format(record)) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "leadline",
        "message": "finished",
        "reason": "stop",
        "total_seconds": 0.5,
    }
    try:
        raise ValueError("boom")
    except ValueError:
        record = logging.makeLogRecord({"msg": "%d bad", "args": (1,), "exc_info": sys.exc_info()})
    line = json.loads(formatter.format(record))
    assert line["message"] == "1 bad"
    assert "ValueError: boom" in line["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_configured_log_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []  # pytest's own would be closed
    try:
        configure_logging(TelemetryConfig(log_level="warning", log_format=log_format))
        logging.getLogger("leadline.x").info("hidden")
        logging.getLogger("leadline.x").warning("shown")
        line = capsys.readouterr().err.strip()
        assert "hidden" not in line
        assert (json.loads(line)["message"] if log_format == "json" else line[-5:]) == "shown"
    finally:
        root.handlers, root.level = before, level
