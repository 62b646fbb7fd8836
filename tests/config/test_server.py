"""Settings of the server that cannot be used, and what is said of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from leadline.config.args import from_values
from leadline.config.server import ServerConfig
from leadline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 65536}, "port is 65536"),
        ({"max_request_bytes": 0}, "max_request_bytes is 0; it must be an integer of at least 1"),
        ({"stream_interval": True}, "stream_interval is True"),
        ({"max_logprobs": -2}, "max_logprobs is -2; it must be an integer of at least -1"),
        ({"request_timeout": -1.0}, "request_timeout is -1.0; it must be a number of at least 0"),
        ({"watchdog_timeout": math.nan}, "watchdog_timeout is nan"),
        ({"watchdog_timeout": None}, "watchdog_timeout is None"),
        ({"rate_limit_rpm": 0}, "rate_limit_rpm is 0"),
        ({"reasoning_field": "thoughts"}, "reasoning_field is 'thoughts'; choose one of both"),
        ({"default_max_tokens": "many"}, "default_max_tokens is 'many'; choose one of deepseek"),
        ({"metrics_prefix": "1"}, "metrics_prefix is '1'"),
        ({"model_alias": ("a",)}, "write NAME=SERVED"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile is given without ssl_certfile"),
        ({"ssl_ca_certs": "ca.pem"}, "ssl_ca_certs is given without ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs is given without ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "ssl_cert_reqs is 3; it must be 0, 1 or 2"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs is 2 without ssl_ca_certs"),
    ],
    ids=str,
)
def test_a_value_outside_its_domain_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_values(ServerConfig, values)
    assert message in str(error.value)


def test_none_is_no_limit_where_it_is_the_default() -> None:
    config = from_values(ServerConfig, {"request_timeout": None, "rate_limit_rpm": None})
    assert config.request_timeout is None
    assert config.access.rate_limit_rpm is None
