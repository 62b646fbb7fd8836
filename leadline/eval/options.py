"""What an evaluation is asked to do: its flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from leadline.core.errors import ConfigError

Scale: TypeAlias = Literal["quick", "standard", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What is asked, and in which arms.

    Attributes:
        quick: few exercises: two minutes on two cores.
        full: as many as it takes to see half a percentage point.
        items: exercises of each cell; wins over the two.
        families: with commas between them; all of them if left out.
        arms: with commas between them, beside exact, which is always there; left out there are
            served with quick, all with full, else replay-both, kv-nvfp4 and served.
        arm: a further arm, NAME:SETTING=VALUE,SETTING=VALUE; may be given several times.
        suite_seed: of the exercises.
        out: folder of evaluation.json, evaluation.md and evaluation.png.
        picture: draw it, which needs the extra eval; left out it is drawn where that is there.
        endpoint: address of an OpenAI server, such as http://localhost:8000/v1, whose model
            --model names; only its accuracy can be told.
        api_key: of that server.
        concurrency: dialogues under way at once, or requests to that server.
    """

    quick: bool = False
    full: bool = False
    items: int | None = None
    families: str | None = None
    arms: str | None = None
    arm: tuple[str, ...] = ()
    suite_seed: int = 0
    out: str = "evaluation"
    picture: bool | None = None
    endpoint: str | None = None
    api_key: str | None = None
    concurrency: int = 32

    def __post_init__(self) -> None:
        if self.quick and self.full:
            raise ConfigError("quick and full exclude each other; choose one")
        if self.items is not None and self.items < 1:
            raise ConfigError(f"items is {self.items}; it must be at least 1")

    @property
    def scale(self) -> Scale:
        return "quick" if self.quick else "full" if self.full else "standard"
