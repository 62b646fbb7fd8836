"""Engine factories that do not get far; no torch, so that their processes start at once."""

from __future__ import annotations

import os
from typing import NoReturn

from leadline.config.engine import EngineConfig
from leadline.core.errors import BadRequest, CheckpointError


def missing_shard(config: EngineConfig) -> NoReturn:
    raise CheckpointError(f"{config.model}: shard 3 is missing")


def bad_request(config: EngineConfig) -> NoReturn:
    raise BadRequest("no such thing", param="here", code="odd")


def foreign(config: EngineConfig) -> NoReturn:
    class Unpicklable(Exception):
        pass

    raise Unpicklable("somebody else's")


def sudden_end(config: EngineConfig) -> NoReturn:
    os._exit(3)
