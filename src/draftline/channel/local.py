"""The in-process channel of colocated placement: packed batches go in, feature batches come out, one ahead."""

from __future__ import annotations

from collections.abc import Callable

from draftline.monitor.phases import Phase, PhaseClock
from draftline.records import FeatureBatch, PackedBatch


class LocalChannel:
    """Feature batches by index. `prefetch` captures the next one early, so that on a GPU its work is queued while the
    host waits for the step before it. Holds at most one batch.
    """

    def __init__(
        self,
        source: Callable[[int], PackedBatch],
        capture: Callable[[PackedBatch], FeatureBatch],
        clock: PhaseClock,
        capturing: Phase = "capture",
    ) -> None:
        """capturing: what `capture` counts as; "data" where it reads files."""
        self.source = source
        self.capture = capture
        self.clock = clock
        self.capturing: Phase = capturing
        self.ahead: FeatureBatch | None = None

    def prefetch(self, index: int) -> None:
        """Capture batch `index` now."""
        self.ahead = self.captured(index)

    def close(self) -> None:
        self.ahead = None

    def get(self, index: int) -> FeatureBatch:
        """The features of batch `index`; captured now unless it is the one prefetched."""
        batch, self.ahead = self.ahead, None
        if batch is not None and batch.packed.index == index:
            return batch
        return self.captured(index)

    def captured(self, index: int) -> FeatureBatch:
        with self.clock.phase("data", index):
            packed = self.source(index)
        with self.clock.phase(self.capturing, index):
            return self.capture(packed)
