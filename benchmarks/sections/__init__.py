"""The sections of ``slice.py``, by name, in the order in which they run."""

from __future__ import annotations

from benchmarks.sections import capacity, decode, sessions, soak, ttft
from benchmarks.sections.section import Section

SECTIONS: dict[str, Section] = {
    "capacity": capacity.SECTION,
    "ttft": ttft.SECTION,
    "decode": decode.SECTION,
    "sessions": sessions.SECTION,
    "soak": soak.SECTION,
}
