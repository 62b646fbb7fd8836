"""What fusing brings is told from the committed results, and all of it is there."""

from __future__ import annotations

import json

from benchmarks.kernel_claims import CLAIMS, RESULTS, lines

FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_every_claim_was_measured_at_every_shape() -> None:
    assert len(lines(FOUND["results"])) == sum(len(claim.shapes) for claim in CLAIMS)


def test_every_claim_stands_beside_separate_launches() -> None:
    for name, shape, us, *ratios, published in lines(FOUND["results"]):
        assert float(us) > 0, (name, shape)
        assert any(ratios), (name, shape)
        assert published


def test_results_say_what_they_were_measured_on() -> None:
    assert FOUND["environment"]["device"] == "NVIDIA H200"
    assert FOUND["environment"]["command"].startswith("python -m benchmarks.kernels")
    assert not FOUND["failures"]
