"""Chats -> prompt ids (serving-api 2).

``deepseek-recipe`` renders the conversation (``text.skeleton``), the assistant's turns come from
``text.turns``; here they are joined, ended as the request asks, and encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from reprlib import repr as brief

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError
from leadline.text.chat import AnswerStart, ChatInput, ChatPrompt, SampledTurn
from leadline.text.markers import TASKS, check_markers
from leadline.text.messages import Message, normalise_messages
from leadline.text.profiles import V41, Profile, check_other_names
from leadline.text.skeleton import Skeleton
from leadline.text.spans import Ids, Span, encode_spans
from leadline.text.thinking import Mode, resolve_mode
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_history import match_results
from leadline.text.tools_schema import check_tools, schema_lines
from leadline.text.turn_memory import TurnMemory
from leadline.text.turns import open_tool_block, turn_header, turn_spans

# Where nothing stands between the prompt and a call that has to be made (C29).
_CONTENT = (AnswerStart.CONTENT, AnswerStart.CONTENT_CONTINUED)


class ChatEncoder:
    """Encodes chats with one tokenizer in one profile; threads may share it.

    Attributes:
        tokenizer: the checkpoint's.
        profile: its chat format.

    Raises:
        ConfigError: the tokenizer lacks a marker that prompts need (C3), or a default of the
            settings is wrong.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        profile: Profile = V41,
        options: ChatConfig | None = None,
    ) -> None:
        check_markers(tokenizer, profile)
        self.tokenizer = tokenizer
        self.profile = profile
        self._options = options or ChatConfig()
        check_other_names(profile, self._options)
        self._defaults = self._options.default_chat_template_kwargs or {}
        try:
            resolve_mode(ChatInput(()), self._defaults, profile)
        except BadRequest as error:
            raise ConfigError(f"default_chat_template_kwargs: {error}") from None
        self._skeleton = Skeleton(profile)
        self._memory = TurnMemory()
        self._opened_block = tuple(encode_spans(tokenizer, open_tool_block(profile)))

    def encode(self, chat: ChatInput, *, tenant: str | None = None) -> ChatPrompt:
        """Encode a chat so that the answer follows.

        Args:
            chat: the request.
            tenant: whose sampled turns are known (C12).

        Raises:
            BadRequest: anything that cannot be rendered, with the field's path.
        """
        mode = resolve_mode(chat, self._defaults, self.profile)
        check_tools(chat.tools, chat.tool_choice, self.profile)
        tools = () if chat.tool_choice.mode == "none" else chat.tools
        messages = self._messages(chat)
        task = _answered_task(chat, messages)
        form = chat.response_format if self._options.response_format_prompt else None
        around = self._skeleton.render(
            messages, mode, tool_lines=schema_lines(tools), response_format=form
        )
        drops = mode.drop_thinking if mode.drop_thinking is not None else not tools
        turns = self._turns(messages, mode, drops_reasoning=drops, tenant=tenant)
        spans = around[0]
        for turn, following in zip(turns, around[1:], strict=True):
            spans += turn + following
        opening, start = self._opening(chat, messages[-1], mode, task)
        spans += opening
        return ChatPrompt(
            token_ids=tuple(encode_spans(self.tokenizer, spans)),
            start=start,
            thinking=mode.thinking,
            is_max_effort=mode.effort is not None and self.profile.is_max_effort(mode.effort),
            tools=tools,
            tool_choice=chat.tool_choice,
        )

    def remember(
        self,
        turn: SampledTurn,
        tenant: str | None = None,
        *,
        start: AnswerStart = AnswerStart.CONTENT,
    ) -> None:
        """Keep a turn with calls, to render it again exactly when its calls come back (C12).

        Args:
            turn: what was generated.
            tenant: who may send it back.
            start: of the prompt that was answered: a block that it opened belongs to the turn.
        """
        opened = self._opened_block if start is AnswerStart.TOOL_BLOCK else ()
        self._memory.put(tenant, turn.content, turn.calls, (*opened, *turn.token_ids))

    def _messages(self, chat: ChatInput) -> list[Message]:
        if chat.continue_final_message and chat.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        messages = normalise_messages(
            chat.messages, continue_final_message=chat.continue_final_message
        )
        if self._options.v4_inline_system == "reminder" and not self.profile.has_system_marker:
            messages = _remind_of_late_systems(messages)
        return match_results(
            messages,
            is_strict=self._options.strict_tool_history,
            is_answered=chat.add_generation_prompt,
        )

    def _turns(
        self,
        messages: Sequence[Message],
        mode: Mode,
        *,
        drops_reasoning: bool,
        tenant: str | None,
    ) -> list[list[Span]]:
        turns = []
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            turns.append(
                turn_spans(
                    message,
                    self.profile,
                    # What goes on is no prior turn: its reasoning is never dropped (C10).
                    shows_reasoning=mode.thinking and (message.is_partial or not drops_reasoning),
                    task=messages[i - 1].task if i else None,
                    sampled=self._sampled(message, tenant),
                )
            )
        return turns

    def _opening(
        self, chat: ChatInput, last: Message, mode: Mode, task: str | None
    ) -> tuple[list[Span], AnswerStart]:
        """What the prompt ends with, and what the answer begins with."""
        start = _answer_start(last, mode, task)
        opening: list[Span] = []
        if not last.is_partial:
            if not chat.add_generation_prompt:
                return [], start
            opening += turn_header(thinks=mode.thinking, task=task)
        if chat.tool_choice.mode in ("required", "named") and start in _CONTENT:
            return [*opening, *open_tool_block(self.profile)], AnswerStart.TOOL_BLOCK
        return opening, start

    def _sampled(self, message: Message, tenant: str | None) -> Ids | None:
        if not message.calls:
            return None
        calls = [(call.id, call.name, call.arguments) for call in message.calls]
        return self._memory.get(tenant, message.content, calls)


def _remind_of_late_systems(messages: Sequence[Message]) -> list[Message]:
    """V4 has no marker for them. Reminders stay in place, so the head of the prompt is stable."""
    first = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    return [
        replace(message, role="latest_reminder")
        if i > first and message.role == "system"
        else message
        for i, message in enumerate(messages)
    ]


def _answered_task(chat: ChatInput, messages: Sequence[Message]) -> str | None:
    """The quick instruction that is to be answered (C15)."""
    for message in messages:
        _check_task(message.task, f"{message.where}.task")
    _check_task(chat.task, "task")
    last = messages[-1]
    if chat.task is not None and last.role not in ("user", "tool"):
        raise BadRequest(
            f"task {chat.task!r} needs a user's message at the end of messages, not one of role "
            f"{last.role}",
            param="task",
        )
    if last.is_partial and len(messages) > 1:
        return messages[-2].task
    return chat.task or last.task


def _check_task(task: object, where: str) -> None:
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise BadRequest(f"{where} is {brief(task)}; choose one of {', '.join(TASKS)}", param=where)


def _answer_start(last: Message, mode: Mode, task: str | None) -> AnswerStart:
    if task is not None and task != "action":
        return AnswerStart.PLAIN
    if last.is_partial and last.content:
        return AnswerStart.CONTENT_CONTINUED
    if not mode.thinking:
        return AnswerStart.CONTENT
    if last.is_partial and last.reasoning:
        return AnswerStart.REASONING_CONTINUED
    return AnswerStart.REASONING
