"""Where the server listens: a TCP port or a Unix socket, and what the log says of it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

from leadline.config.server import ServerConfig
from leadline.core.errors import ConfigError
from leadline.core.version import __version__

logger = logging.getLogger(__name__)

# Of file descriptors, one a connection: shells often give 1,024.
_MAX_FILES = 65_536


def bind(config: ServerConfig) -> socket.socket:
    """A socket that holds the address; the process may then have as many connections as it can.

    Raises:
        ConfigError: the address cannot be had.
    """
    _raise_file_limit()
    try:
        if config.uds is not None:
            return _bind_unix(config.uds)
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise ConfigError(
            f"cannot listen on {where} ({error.strerror}); choose another --host, --port or --uds"
        ) from error
    return listener


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind_unix(path: str) -> socket.socket:
    """A Unix socket; one that a server left behind makes way, one in use does not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            Path(path).unlink()
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    return listener


def announce(names: Sequence[str], config: ServerConfig, listener: socket.socket) -> None:
    """Log what is served where, and warn when that is open to everybody."""
    address = listener.getsockname()
    if config.uds is not None:
        where = f"unix:{config.uds}"
    else:
        scheme = "https" if config.tls.ssl_certfile else "http"
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        where = f"{scheme}://{host}:{address[1]}{config.root_path}/v1"
    logger.info("leadline %s serves %s at %s", __version__, ", ".join(names), where)
    has_keys = config.access.api_key or config.access.api_key_file
    if config.uds is None and not has_keys and not ipaddress.ip_address(address[0]).is_loopback:
        logger.warning(
            "%s is reachable from other machines and there are no API keys: anyone who reaches "
            "the port may use it; set --api-key, or --host 127.0.0.1 to keep it to this machine",
            address[0],
        )
