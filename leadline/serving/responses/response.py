"""The response object: what was asked and what came of it (serving-api 7, 13.3)."""

from __future__ import annotations

from typing import Any

from leadline.core.request import SamplingParams
from leadline.serving.responses.schema import ReasoningOptions, ResponsesRequest, TextOptions
from leadline.serving.usage import TokenCounts


def settings(body: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    """The request's settings as a response echoes them."""
    reasoning = body.reasoning or ReasoningOptions()
    text = body.text or TextOptions()
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": {
            "format": text.format or {"type": "text"},
            "verbosity": text.verbosity or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Token counts under this dialect's names."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }
