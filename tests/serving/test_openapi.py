"""The API's description, and requests that schemathesis makes from it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route
from starlette.testclient import TestClient

from leadline.serving.console import CONSOLE_PATHS
from tests.serving.conftest import MakeRig, Rig
from tests.serving.test_odd_values import BODIES

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ADMIN = {"enable_admin_endpoints": True, "admin_api_key": "root"}
KEY = {"x-api-key": "root"}
EVERYTHING: dict[str, Any] = {**ADMIN, "enable_responses_store": True}

# Conversations, which the types of bodies leave open.
FILLED = dict(reversed(BODIES.values()))


def paths_of(server: Rig) -> dict[str, Any]:
    paths: dict[str, Any] = server.http.get("/openapi.json", headers=KEY).json()["paths"]
    return paths


def test_every_route_is_described_but_the_files_of_the_page(rig: MakeRig) -> None:
    server = rig("a", **ADMIN)
    paths = paths_of(server)
    for route in server.app.routes:
        assert isinstance(route, Route)
        if route.path not in CONSOLE_PATHS:
            described = {method.upper() for method in paths[route.path_format]}
            assert described >= (route.methods or set()) - {"HEAD"}, route.path
    assert not CONSOLE_PATHS & paths.keys()


def test_every_body_that_a_route_takes_or_gives_has_a_type(rig: MakeRig) -> None:
    reply = rig("a").http.get("/openapi.json").json()
    chat = reply["paths"]["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatRequest"}
    for path, methods in reply["paths"].items():
        takes_body = "post" in methods and not path.endswith("/cancel")
        assert takes_body == any("requestBody" in method for method in methods.values()), path
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', str(reply).replace("'", '"')))
    assert named <= reply["components"]["schemas"].keys()


def test_the_description_needs_a_key_and_knows_where_a_proxy_shows_it(rig: MakeRig) -> None:
    server = rig("a", api_key=("k",))
    assert server.http.get("/openapi.json").status_code == 401
    proxied = TestClient(server.app, root_path="/ai")
    reply = proxied.get("/ai/openapi.json", headers={"x-api-key": "k"})
    assert reply.json()["servers"] == [{"url": "/ai"}]


def fuzz(server: Rig, max_examples: int) -> Counter[int]:
    """Check answers to so many requests of every operation; returns how many had which status."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", server.app, headers=KEY)
    statuses: Counter[int] = Counter()
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        statuses += fuzz_operation(found.ok(), max_examples)
    assert server.app.state.server.admission.num_open == 0
    return statuses


def fuzz_operation(operation: Any, max_examples: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    filled = FILLED.get(operation.path, {}) | {"model": None}

    @settings(
        max_examples=max_examples,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # what fails is printed as it was sent
    )
    @given(case=operation.as_strategy(), is_filled=st.booleans())
    def ask(case: schemathesis.Case[Any], is_filled: bool) -> None:
        if is_filled and isinstance(case.body, dict):
            case.body = case.body | filled
        reply = case.call(headers=KEY)
        case.validate_response(reply, checks=CHECKS, headers=KEY)
        statuses[reply.status_code] += 1

    ask()
    return statuses


def test_generated_requests_are_answered_as_described(rig: MakeRig) -> None:
    statuses = fuzz(rig("b</think>a", **EVERYTHING), 15)
    assert statuses[200] > 20, statuses
    assert statuses[400] > 20, statuses


@pytest.mark.slow
def test_many_generated_requests_are_answered_as_described(rig: MakeRig) -> None:
    statuses = fuzz(rig("b</think>a", **EVERYTHING), 500)
    print(dict(statuses))
