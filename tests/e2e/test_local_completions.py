"""What ``lm-eval``'s local-completions model sends, and reads in the answers."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import httpx
import pytest


class LocalCompletions:
    """Its requests, over a tokenizer that lies at the server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = httpx.post(self._url + path, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def encode(self, text: str) -> list[int]:
        return list(self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])

    def generate(self, *prompts: list[int], until: list[str], max_tokens: int) -> list[str]:
        body = {
            "prompt": prompts,
            "model": "tiny",
            "max_tokens": max_tokens,
            "temperature": 0,
            "stop": until,
            "seed": 1234,
        }
        choices = self.post("/v1/completions", body)["choices"]
        return [choice["text"] for choice in sorted(choices, key=itemgetter("index"))]

    def loglikelihood(self, *pairs: tuple[list[int], list[int]]) -> list[tuple[float, bool]]:
        """Of each continuation behind its context, and whether it is the greedy one."""
        body = {
            "model": "tiny",
            "prompt": [context + continuation for context, continuation in pairs],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        choices = self.post("/v1/completions", body)["choices"]
        found = []
        for choice, (context, continuation) in zip(
            sorted(choices, key=itemgetter("index")), pairs, strict=True
        ):
            tokens = choice["logprobs"]["token_logprobs"]
            assert len(tokens) == len(context) + len(continuation) + 1
            assert tokens[0] is None
            scored = slice(len(context), -1)
            best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][scored]]
            found.append((sum(tokens[scored]), tokens[scored] == best))
        return found


@pytest.fixture
def harness(base_url: str) -> LocalCompletions:
    return LocalCompletions(base_url)


def test_the_tokenizer_is_found(base_url: str, harness: LocalCompletions) -> None:
    told = httpx.get(f"{base_url}/tokenizer_info").json()
    assert len(harness.encode(told["eos_token"])) == 1
    ids = harness.encode("Question: 2 + 3\nAnswer:")
    assert harness.post("/detokenize", {"tokens": ids})["prompt"] == "Question: 2 + 3\nAnswer:"


def test_generate_until(harness: LocalCompletions) -> None:
    prompts = [harness.encode(f"Question: {n} + 1\nAnswer:") for n in range(3)]
    free = harness.generate(*prompts, until=["Question:"], max_tokens=12)
    assert free == [harness.generate(p, until=["Question:"], max_tokens=12)[0] for p in prompts]
    longest = max(free, key=len)
    stop = longest[len(longest) // 2 :][:1]
    [cut] = harness.generate(prompts[free.index(longest)], until=[stop], max_tokens=12)
    assert cut == longest.partition(stop)[0]


def test_loglikelihoods_of_choices(harness: LocalCompletions) -> None:
    """The greedy continuation is told as such, and is likelier than others of its length."""
    context = harness.encode("Question: 2 + 3\nAnswer:")
    body = {"model": "tiny", "prompt": context, "temperature": 0, "max_tokens": 4, "logprobs": 0}
    [choice] = harness.post("/v1/completions", {**body, "return_token_ids": True})["choices"]
    greedy = choice["token_ids"]
    others = [harness.encode(text)[:1] for text in (" blue", "7", "(")]
    found = harness.loglikelihood((context, greedy), *((context, other) for other in others))
    (value, is_greedy), *rest = found
    assert is_greedy
    assert value == pytest.approx(sum(choice["logprobs"]["token_logprobs"]), abs=2e-3)
    first = choice["logprobs"]["token_logprobs"][0]
    assert all(other < first and not greedy for other, greedy in rest)
