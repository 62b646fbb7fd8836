from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import numpy as np
import pytest
import torch

import leadline.llm
from leadline import LLM, SamplingParams, StructuredOutputsParams
from leadline.config.engine import EngineConfig
from leadline.core.client import EngineStats
from leadline.core.errors import BadRequest, ConfigError, LeadlineError, NotSupported
from leadline.core.request import EngineRequest, FinishReason, TokenLogprobs, TokenOutput
from leadline.engine.limits import RequestLimits
from leadline.text.chat import ChatInput
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 32 * 2**20,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}
EOS = 1


@dataclass
class ScriptedEngine:
    """Answers every request with the same tokens, ``pace`` of them a step; no model."""

    answer: Sequence[int] = (5, 6, 7, 8)
    pace: int = 1
    error: str | None = None
    config: EngineConfig | None = None
    added: list[EngineRequest] = field(default_factory=list)
    is_paused: bool = False
    aborted: list[str] = field(default_factory=list)
    live: dict[str, Iterator[TokenOutput]] = field(default_factory=dict)

    def add(self, request: EngineRequest) -> None:
        if 999 in request.prompt_token_ids:
            raise BadRequest("the prompt holds 999", param="prompt")
        self.added.append(request)
        self.live[request.request_id] = self._outputs(request)

    def _outputs(self, request: EngineRequest) -> Iterator[TokenOutput]:
        length = min(request.sampling.max_tokens, len(self.answer))
        for start in range(0, length, self.pace):
            ids = tuple(self.answer[start : min(start + self.pace, length)])
            done = start + self.pace >= length
            stop = ids[-1] if done and ids[-1] in (EOS, *request.sampling.stop_token_ids) else None
            reason = FinishReason.STOP if stop is not None else FinishReason.LENGTH
            yield TokenOutput(
                request.request_id,
                ids,
                tuple(TokenLogprobs(id, -0.5, 2, ((id + 1, -0.25),)) for id in ids),
                finish_reason=(FinishReason.ERROR if self.error else reason) if done else None,
                stop_token_id=stop,
                num_cached_tokens=3,
                error=self.error,
            )

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(vocab_size=1000, max_model_len=500, num_pages=9, page_size=256)

    def pause(self, paused: bool) -> None:
        self.is_paused = paused

    def wait(self) -> None:
        pass

    def step(self) -> list[TokenOutput]:
        # The last request first: results must come back in the order of the prompts.
        outputs = [next(self.live[name]) for name in reversed(self.live)]
        for output in outputs:
            if output.finish_reason is not None:
                del self.live[output.request_id]
        return outputs

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.live.pop(request_id, None)

    def stats(self) -> EngineStats:
        return EngineStats()

    def prompt_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return np.zeros((len(token_ids), 10), np.float32)

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture
def scripted(
    monkeypatch: pytest.MonkeyPatch, random_tiny: Path
) -> Callable[..., tuple[LLM, ScriptedEngine]]:
    def make(options: dict[str, Any] | None = None, **script: Any) -> tuple[LLM, ScriptedEngine]:
        engine = ScriptedEngine(**script)

        def build(config: EngineConfig) -> ScriptedEngine:
            engine.config = config
            return engine

        monkeypatch.setattr(leadline.llm, "build_engine", build)
        return LLM(model=random_tiny, **(options or {})), engine

    return make


@pytest.fixture(scope="module")
def tiny(random_tiny: Path) -> Iterator[LLM]:
    with LLM(model=random_tiny, **SMALL) as llm:
        yield llm


Scripted = Callable[..., tuple[LLM, ScriptedEngine]]


def test_options_reach_the_engine_under_their_own_names(
    scripted: Scripted, random_tiny: Path
) -> None:
    _, engine = scripted(
        {
            "dtype": "float32",
            "kv_cache_dtype": "fp8",
            "max_model_len": 512,
            "max_num_seqs": 3,
            "enable_prefix_caching": False,
            "swa_bounded_replay": False,
            "seed": 4,
            "tensor_parallel_size": 1,
        }
    )
    assert engine.config is not None
    assert engine.config.model == str(random_tiny)
    assert engine.config.dtype == "float32"
    assert engine.config.cache.kv_cache_dtype == "fp8"
    assert engine.config.max_model_len == 512
    assert engine.config.scheduler.max_num_seqs == 3
    assert engine.config.seed == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_modle_len": 8}, TypeError, "'max_modle_len'; did you mean max_model_len"),
        ({"xyzzy": 8}, TypeError, "unexpected keyword argument 'xyzzy'$"),
        ({"dtype": "int3"}, ConfigError, "dtype is 'int3'"),
        ({"tensor_parallel_size": 2}, NotSupported, "tensor parallelism does not exist yet"),
        ({"swa_replay_length": 0}, ConfigError, "swa_replay_length is 0"),
        ({"tokenizer": "/nowhere"}, ConfigError, "/nowhere: not a readable tokenizer.json"),
    ],
    ids=str,
)
def test_bad_options_are_named(
    scripted: Scripted, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scripted(options)


def test_prompts_come_in_every_form_and_results_in_their_order(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    llm, engine = scripted()
    bos = tokenizer.bos_token_id
    hello = [bos, *tokenizer.encode("hello")]
    forms: list[tuple[Any, list[list[int]]]] = [
        ("hello", [hello]),
        (["hello", "hello"], [hello, hello]),
        ([9, 8], [[9, 8]]),
        ([[9, 8], (7,)], [[9, 8], [7]]),
        (np.array([9, 8]), [[9, 8]]),
        ({"prompt": "hello"}, [hello]),
        ({"prompt_token_ids": [3, 4]}, [[3, 4]]),
        (["hello", {"prompt_token_ids": [3]}, [4]], [hello, [3], [4]]),
        ("<｜begin▁of▁sentence｜>hello", [hello]),
        ([], []),
    ]
    for prompts, want in forms:
        results = llm.generate(prompts, use_tqdm=False)
        assert [result.prompt_token_ids for result in results] == want
        assert all(result.finished for result in results)
    assert len({request.request_id for request in engine.added}) == len(engine.added)


def test_salts_of_prompts_reach_the_engine(scripted: Scripted) -> None:
    llm, engine = scripted()
    prompts: list[Any] = [{"prompt_token_ids": [5], "cache_salt": "a"}, [6]]
    llm.generate(prompts, use_tqdm=False)
    assert [request.cache_salt for request in engine.added] == ["a", None]


def test_results_hold_what_vllm_users_read(scripted: Scripted, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    llm, _ = scripted(answer=[*ids, EOS], pace=2)
    params = SamplingParams(max_tokens=50, logprobs=1)
    result = llm.generate("hi", params, use_tqdm=False)[0]
    [output] = result.outputs
    assert (result.prompt, result.num_cached_tokens) == ("hi", 3)
    assert (output.index, output.text, output.finish_reason) == (0, "one two three", "stop")
    assert output.token_ids == [*ids, EOS]
    assert output.stop_reason is None
    assert output.logprobs is not None
    assert len(output.logprobs) == len(ids) + 1
    assert output.cumulative_logprob == pytest.approx(-0.5 * (len(ids) + 1))
    entry = output.logprobs[0]
    assert entry[ids[0]].rank == 2
    assert entry[ids[0] + 1].rank == 1
    assert entry[ids[0]].decoded_token == tokenizer.decode([ids[0]])


def test_a_stop_string_ends_text_tokens_and_the_engines_request(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    words = [tokenizer.encode(word) for word in ("one", " two", " three", " four")]
    before = len(words[0] + words[1])
    llm, engine = scripted(answer=list(itertools.chain(*words)), pace=before + 2)
    params = SamplingParams(max_tokens=99, stop=("two",), logprobs=0)
    output = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("one ", "stop", "two")
    assert len(output.token_ids) == before
    assert output.logprobs is not None
    assert len(output.logprobs) == before
    assert engine.aborted == [engine.added[0].request_id]


def test_stop_token_ids_are_the_stop_reason(scripted: Scripted) -> None:
    for options in ({}, {"skip_tokenizer_init": True}):
        llm, _ = scripted(options, answer=(5, 6, 7))
        params = SamplingParams(max_tokens=9, stop_token_ids=(7,))
        output = llm.generate([3], params, use_tqdm=False)[0].outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", 7)
        assert output.token_ids == [5, 6, 7]


def test_n_choices_are_requests_with_seeds_that_count_up(scripted: Scripted) -> None:
    llm, engine = scripted()
    result = llm.generate([3], SamplingParams(n=3, seed=2**63 - 2), use_tqdm=False)[0]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert [r.sampling.seed for r in engine.added] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {r.sampling.n for r in engine.added} == {1}


def test_one_bad_prompt_raises_before_anything_runs(scripted: Scripted) -> None:
    llm, engine = scripted()
    with pytest.raises(BadRequest, match="holds 999"):
        llm.generate([[3], [999], [4]], use_tqdm=False)
    assert engine.live == {}
    assert llm.generate([3], use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", 3.5], None, r"prompts\[1\] is 3.5; it must be a string or a list of token ids"),
        ([[1, 2.5]], None, r"prompts\[0\] is \[1, 2.5\]; it must be a string"),
        (["a", ""], None, r"prompts\[1\] is empty; it needs at least one token"),
        ({"prompt_token_ids": []}, None, "prompt is empty; it needs at least one token"),
        ({"prompt": ["a"]}, None, r"prompt.prompt is \['a'\]; it must be a string"),
        ({"prompt_token_ids": "ab"}, None, "prompt_token_ids is 'ab'; it must be a list of token"),
        ({"prompt": "a", "cache_salt": 5}, None, "prompt.cache_salt is 5; it must be a string"),
        (
            {"prompt": "a", "multi_modal_data": {"image": b"png"}},
            None,
            "prompt.multi_modal_data: images are not supported",
        ),
        ([5] * 500, None, "prompt is too long: 500 tokens > 499 maximum; .* shorten prompt$"),
        ([[5], [5] * 500], None, r"too long: 500 tokens > 499 maximum; .* shorten prompts\[1\]$"),
        ("a", [], "sampling_params has 0 entries for 1 prompts"),
        ({"text": "a"}, None, r"prompt has the keys \['text'\]"),
        ({"prompt": "a", "salt": "b"}, None, r"has the keys \['prompt', 'salt'\]"),
        (["a", "b"], [SamplingParams()], "sampling_params has 1 entries for 2 prompts"),
    ],
    ids=brief,
)
def test_bad_calls_say_what_is_wrong(
    scripted: Scripted, prompts: Any, params: Any, message: str
) -> None:
    llm, engine = scripted()
    with pytest.raises(BadRequest, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert engine.added == []


def test_a_failed_request_raises_and_ends_the_others(scripted: Scripted) -> None:
    llm, engine = scripted(error="op rms_norm gave a non-finite value")
    with pytest.raises(LeadlineError, match="request 0 failed: op rms_norm"):
        llm.generate([[3]], use_tqdm=False)
    assert engine.live == {}


def test_without_a_tokenizer_ids_work_and_text_is_refused(scripted: Scripted) -> None:
    llm, _ = scripted({"skip_tokenizer_init": True})
    output = llm.generate([3], use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.text) == ([5, 6, 7, 8], "")
    with pytest.raises(ConfigError, match="no tokenizer"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(BadRequest, match="stop strings need a tokenizer"):
        llm.generate([3], SamplingParams(stop=("x",)), use_tqdm=False)


def test_detokenize_false_leaves_the_text_empty(scripted: Scripted) -> None:
    llm, _ = scripted()
    output = llm.generate([3], SamplingParams(detokenize=False), use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == ([5, 6, 7, 8], "", "length")


def test_chat_prompts_are_the_encoders_and_take_its_limit(
    scripted: Scripted, tokenizer: Tokenizer
) -> None:
    llm, engine = scripted()
    messages = [{"role": "user", "content": "hello"}]
    result = llm.chat(messages, use_tqdm=False)[0]
    want = ChatEncoder(tokenizer).encode(ChatInput(messages))
    assert result.prompt_token_ids == list(want.token_ids)
    assert engine.added[0].sampling.max_tokens == 500 - len(want.token_ids)
    off = llm.chat(messages, chat_template_kwargs={"thinking": False}, use_tqdm=False)[0]
    assert off.prompt is not None
    assert off.prompt.endswith("</think>")


def test_chat_takes_several_conversations_and_continues_the_last_message(
    scripted: Scripted,
) -> None:
    llm, _ = scripted()
    user = {"role": "user", "content": "hello"}
    one, two = llm.chat([[user], [user]], use_tqdm=False)
    assert one.prompt == two.prompt
    started = llm.chat(
        [user, {"role": "assistant", "content": "It is"}],
        continue_final_message=True,
        use_tqdm=False,
    )[0]
    assert started.prompt is not None
    assert started.prompt.endswith("It is")
    with pytest.raises(BadRequest, match="exclude each other"):
        llm.chat([user], add_generation_prompt=True, continue_final_message=True)


def test_fields_that_chats_do_not_have_are_named(scripted: Scripted) -> None:
    llm, _ = scripted()
    with pytest.raises(TypeError, match="unexpected keyword argument 'chat_template'"):
        llm.chat([{"role": "user", "content": "a"}], chat_template="{{ messages }}")  # type: ignore[call-arg]


def test_greedy_answers_do_not_depend_on_the_batch(tiny: LLM) -> None:
    prompts = [[5, 6, 7], list(range(2, 90)), [40]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    together = tiny.generate(prompts, params, use_tqdm=False)
    for prompt, result in zip(prompts, together, strict=True):
        alone = tiny.generate([prompt], params, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
        assert len(alone.outputs[0].token_ids) == 6


def test_prompt_logits_predict_the_greedy_token(tiny: LLM) -> None:
    prompt = list(range(2, 80))
    logits = tiny.prompt_logits(prompt)
    assert logits.dtype == torch.float32
    assert logits.shape[0] == len(prompt)
    params = SamplingParams(temperature=0, max_tokens=1)
    output = tiny.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == [int(logits[-1].argmax())]


def test_seeds_reproduce_and_unseeded_requests_differ(tiny: LLM) -> None:
    seeded = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    first, again = (tiny.generate("hello", seeded, use_tqdm=False) for _ in range(2))
    assert first[0].outputs[0].token_ids == again[0].outputs[0].token_ids
    free = SamplingParams(n=4, max_tokens=6, ignore_eos=True)
    outputs = tiny.generate("hello", free, use_tqdm=False)[0].outputs
    assert len({tuple(output.token_ids) for output in outputs}) > 1


def test_c42_content_is_json_and_reasoning_is_free(tiny: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema)
    params = SamplingParams(
        seed=5, max_tokens=250, structured_outputs=form, thinking_token_budget=20
    )
    raw = tiny.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert json.loads(raw.text)["a"] in (1, 2)
    messages = [{"role": "user", "content": "hello"}]
    chat = tiny.chat(messages, params, use_tqdm=False)[0].outputs[0]
    reasoning, _, content = chat.text.partition("</think>")
    assert len(tiny.get_tokenizer().encode(reasoning)) >= 10
    assert json.loads(content)["a"] in (1, 2)
    assert chat.finish_reason == "stop"


def test_c29_a_named_function_is_called(tiny: LLM) -> None:
    """R5: thinking is on, and nobody refuses."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    [result] = tiny.chat(
        [{"role": "user", "content": "hello"}],
        SamplingParams(seed=5, max_tokens=100, thinking_token_budget=3),
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "f"}},
        use_tqdm=False,
    )
    [output] = result.outputs
    assert output.finish_reason == "stop"
    assert output.text.count('invoke name="f"') == 1
    assert re.search(r'name="n" string="false">[12]</', output.text)


def test_bad_words_never_come(tiny: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = tiny.generate("hello", free, use_tqdm=False)[0].outputs[0]
    word = tiny.get_tokenizer().decode(first.token_ids[:1])
    kept = tiny.generate("hello", replace(free, bad_words=(word,)), use_tqdm=False)[0].outputs[0]
    assert first.token_ids[0] not in kept.token_ids


def test_c43_a_bad_grammar_in_a_list_raises_before_anything_runs(tiny: LLM) -> None:
    before = tiny._engine.stats().counters
    good = SamplingParams(structured_outputs=StructuredOutputsParams(choice=("yes", "no")))
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="start: missing"))
    with pytest.raises(BadRequest, match=r'cannot be compiled: .*unknown name: "missing"'):
        tiny.generate(["a", "b", "c"], [SamplingParams(), good, bad], use_tqdm=False)
    assert tiny._engine.stats().counters == before
    assert tiny.generate("b", good, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


def test_prompt_logprobs_are_those_of_the_prompts_logits(tiny: LLM) -> None:
    prompt = list(range(2, 80))
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    [result] = tiny.generate(prompt, params, use_tqdm=False)
    want = tiny.prompt_logits(prompt).log_softmax(-1)
    assert result.outputs[0].token_ids == []
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(prompt)
    for token, row, entry in zip(prompt[1:], want, result.prompt_logprobs[1:], strict=False):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry[int(row.argmax())].rank == 1


def test_repeated_prompts_tell_what_was_cached(tiny: LLM) -> None:
    tiny.reset_prefix_cache()
    prompt = [5, 6] * 300
    params = SamplingParams(max_tokens=1)
    first, again = (tiny.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 512)
    assert again.metrics.arrival_time >= (first.metrics.finished_time or math.inf)


def test_exports_are_found_by_their_names() -> None:
    for name in leadline.__all__:
        assert getattr(leadline, name)
    assert leadline.StructuredOutputsParams is leadline.StructuredOutputs
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        leadline.LMM  # noqa: B018


NOT_ON_GPU_MACHINES = """
import sys
class Absent:
    names = {"deepseek_recipe", "httptools", "huggingface_hub", "llguidance", "msgspec",
             "prometheus_client", "prompt_toolkit", "rich", "shtab", "starlette", "tqdm",
             "uvicorn", "uvloop", "yaml", "zstandard"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from leadline import LLM, SamplingParams
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, kv_cache_memory_bytes=2**25, max_num_seqs=2,
          max_num_batched_tokens=64)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
print(len(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids))
"""


def test_token_ids_need_no_other_package(random_tiny: Path) -> None:
    """GPU machines may have torch, numpy, safetensors and tokenizers only."""
    done = subprocess.run(
        [sys.executable, "-c", NOT_ON_GPU_MACHINES, random_tiny],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.stdout.strip() == "3", done.stderr
