"""The control tokens that prompts are written with, by the model maker's spelling (1.1)."""

from __future__ import annotations

import deepseek_recipe as recipe

from leadline.text.profiles import Profile
from leadline.text.spans import Marker
from leadline.text.tokenizer import Tokenizer

# The released tokenizers have no <｜image｜>, which is the library's own default.
SPECIAL_TOKENS = recipe.SpecialTokens(image="<｜deepseek_image｜>")


def _marker(token: recipe.SpecialToken) -> Marker:
    return Marker(SPECIAL_TOKENS.token(token))


BOS = _marker(recipe.SpecialToken.Bos)
EOS = _marker(recipe.SpecialToken.Eos)
SYSTEM = _marker(recipe.SpecialToken.System)
USER = _marker(recipe.SpecialToken.User)
ASSISTANT = _marker(recipe.SpecialToken.Assistant)
LATEST_REMINDER = _marker(recipe.SpecialToken.LatestReminder)
THINK_START = _marker(recipe.SpecialToken.ThinkingStart)
THINK_END = _marker(recipe.SpecialToken.ThinkingEnd)
DSML = _marker(recipe.SpecialToken.Dsml)
IMAGE = _marker(recipe.SpecialToken.Image)
# Quick instructions (2.7); the library has none.
TASKS = {
    task: Marker(f"<｜{task}｜>")
    for task in ("action", "query", "authority", "domain", "title", "read_url")
}

_EVERYWHERE = (BOS, EOS, USER, ASSISTANT, LATEST_REMINDER, THINK_START, THINK_END, DSML)


def check_markers(tokenizer: Tokenizer, profile: Profile) -> None:
    """Look every marker of a profile up once, at start.

    Raises:
        ConfigError: the tokenizer lacks one (C3).
    """
    v41 = (SYSTEM, IMAGE) if profile.has_system_marker else ()
    for marker in (*_EVERYWHERE, *v41, *TASKS.values()):
        tokenizer.marker_id(marker)
