"""How numbers came about: what any file of results tells of the run behind it."""

from __future__ import annotations

import platform
from datetime import UTC, datetime

from leadline.core.version import __version__


def provenance(command: str) -> dict[str, str]:
    """Command, time and versions; settings and the device are for those to add who have them.

    Args:
        command: how the run was called.
    """
    return {
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "leadline": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
