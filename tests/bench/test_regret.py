"""The choice of a variant against times recorded on a device, where there is a recording."""

from __future__ import annotations

from pathlib import Path

from knnpool_gen.bench.record import read_recording
from knnpool_gen.bench.regret import regrets
from knnpool_gen.bench.variants import model_choice
from knnpool_gen.runtime.select import H200

RECORDED = Path(__file__).parents[1] / "data" / "variants_h200.json"
"""What ``knnpool-gen bench --variants --json FILE`` wrote on an H200."""
ALLOWED = 0.05
NOISE = 0.5
"""Microseconds by which kernels of two or three differ from run to run."""
KNOWN = {
    "alexnet64_out 512x256 float32 avg forward",
    "alexnet256_pool0 8x96 float16 max backward",
}
"""Where the model of the choice is not good enough yet."""


def test_the_choice_is_nearly_the_best() -> None:
    found = regrets(read_recording(RECORDED).variants, lambda case: model_choice(case, H200))
    assert len(found) == 56
    assert {regret.case for regret in found if regret.share > ALLOWED and regret.microseconds > NOISE} == KNOWN
    assert all(regret.share <= 0.25 for regret in found)
