"""An application over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from leadline.config.args import from_values
from leadline.config.server import ServerConfig
from leadline.serving.app import build_app
from leadline.serving.context import ModelInfo
from leadline.text.tokenizer import Tokenizer
from tests.serving import live
from tests.serving.scripted import ScriptedEngine, Step
from tests.text.prompts import in_v4

MODEL_INFO = ModelInfo(root="house/tiny", max_model_len=8192, vocab_size=1024)
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@dataclass
class Rig:
    """A server, and the scripted engine behind it."""

    engine: ScriptedEngine
    app: Starlette
    http: TestClient
    tokenizer: Tokenizer

    @property
    def prompt(self) -> str:
        """The last prompt that the engine got, with its markers."""
        return self.tokenizer.decode(self.engine.requests[-1].prompt_token_ids)

    @property
    def script(self) -> str:
        """What the engine says, up to its end token."""
        steps = (step for step in self.engine.script if not isinstance(step, BaseException))
        text = self.tokenizer.decode([token_id for step in steps for token_id in step])
        return text.removesuffix("<｜end▁of▁sentence｜>")

    def say(self, text: str) -> None:
        """Let the engine say another text from now on."""
        ids = (*self.tokenizer.encode(text), self.tokenizer.eos_token_id)
        self.engine.script = [(token_id,) for token_id in ids]

    def post(self, path: str, **body: Any) -> Any:
        """The whole answer to a body."""
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refuse(self, path: str, **body: Any) -> Any:
        """The error that a body is answered by."""
        reply = self.http.post(path, json=body)
        assert 400 <= reply.status_code < 500, reply.text
        return reply.json()["error"]

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream whose events have names, which are the types."""
        reply = self.http.post(path, json={"stream": True} | body)
        assert reply.status_code == 200, reply.text
        found = []
        for block in reply.text.split("\n\n")[:-1]:
            name, _, data = block.partition("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
        return found

    def chat(self, **body: Any) -> Any:
        """The whole answer to a chat."""
        reply = self.http.post("/v1/chat/completions", json={"messages": HELLO} | body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """The chunks of a stream; checks its frame."""
        body = {"stream": True} | ({"messages": HELLO} if "chat" in path else {}) | body
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [event for event in reply.text.split("\n\n") if not event.startswith(":")]
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


MakeRig = Callable[..., Rig]

# For tests of the checklist: a statement that names no profile holds for both.
both_profiles = pytest.mark.parametrize("rig", ["v41", "v4"], indirect=True)


@pytest.fixture
def rig(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> MakeRig:
    """Make a rig whose engine says a text or steps of ids; markers in the text are markers.

    The profile is V4.1's, or the one that ``both_profiles`` gives; tool blocks of a text are
    spelled as its model spells them.
    """
    profile: str = getattr(request, "param", "v41")

    def make(
        script: str | list[Step],
        *,
        end: bool = True,
        max_model_len: int = 8192,
        tokenizer: Tokenizer = tokenizer,
        folder: Path | None = None,
        **config: Any,
    ) -> Rig:
        if isinstance(script, str):
            text = in_v4(script) if profile == "v4" else script
            steps: list[Step] = [(token_id,) for token_id in tokenizer.encode(text)]
        else:
            steps = list(script)
        if end:
            steps.append((tokenizer.eos_token_id,))
        engine = ScriptedEngine(steps, eos=tokenizer.eos_token_id)
        model_info = replace(MODEL_INFO, max_model_len=max_model_len)
        settings = from_values(ServerConfig, {"effort_profile": profile} | config)
        app = build_app(engine, tokenizer, model_info, settings, folder=folder)
        return Rig(engine, app, TestClient(app), tokenizer)

    return make


def joined(chunks: list[Any], key: str, index: int = 0) -> str:
    """The text of one key over all chunks of one choice."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(part["delta"].get(key) or "" for part in parts)


def serving(server: Rig) -> AbstractContextManager[str]:
    """Serve on a free port; yields its address."""
    return live.serving(server.app)
