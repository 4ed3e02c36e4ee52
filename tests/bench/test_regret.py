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

if RECORDED.is_file():

    def test_the_choice_is_nearly_the_best() -> None:
        found = regrets(read_recording(RECORDED).variants, lambda case: model_choice(case, H200))
        assert len(found) > 0
        assert [regret for regret in found if regret.share > ALLOWED] == []
