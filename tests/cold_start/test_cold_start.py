"""Three processes at once on an emptied compile cache all come up and agree, and warm ones after them."""

from __future__ import annotations

import pytest
from rounds import cold_round

pytestmark = pytest.mark.cold


def test_three_cold_processes_come_up_agree_and_equal_the_uncompiled_step(tmp_path) -> None:
    cold = cold_round(3, "cpu", keep_cache=str(tmp_path))
    assert cold.faults == []
    warm = cold_round(3, "cpu", keep_cache=str(tmp_path))
    assert warm.faults == []
    slowest_warm = max(ended.result["compile_s"] for ended in warm.ended)
    fastest_cold = min(ended.result["compile_s"] for ended in cold.ended)
    assert slowest_warm < 0.5 * fastest_cold  # the cache serves: otherwise the cold round was none
    assert {ended.result["loss"] for ended in warm.ended} == {ended.result["loss"] for ended in cold.ended}
