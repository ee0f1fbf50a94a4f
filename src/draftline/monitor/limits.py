"""The thresholds of the verdicts, each with the reason for its value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    fewest_steps: int = 5
    """A median of fewer steps says little."""
    wait_share: float = 0.2
    """A stage limits where the other side waits longer: below it, buffers and uneven rows explain the wait."""
    starved_share: float = 0.5
    """From here on one side's devices wait for more than half of their time."""
    data_share: float = 0.1
    """Reading and packing rows is to be hidden; a tenth of the time is a tenth of the accelerators."""
    main_share: float = 0.6
    """A colocated rank is bound by what takes this much of its step; in between it is balanced."""
    idle_share: float = 0.3
    """A stage that limits keeps its device above 60% busy even with small kernels; the incident's had 0 to 3%."""
    launch_bound_s: float = 0.3
    """A GPU's shorter steps may wait for the host: five layers' launches take 15 to 20 ms a micro-batch."""
    straggler_factor: float = 1.5
    """Equal work on equal devices differs by a few percent, on a shared CPU by a third."""
    straggler_s: float = 0.02
    """Below this, scheduling noise is as large as the work."""
    peer_gap: float = 0.3
    """Replicas hold the same tensors: the incident's healthy two differed by 12%, the third by 64%."""
    peer_gap_bytes: int = 512 * 2**20
    """What a CUDA context, a cache of kernels or rank 0's extra duties may take."""
    checkpoint_share: float = 0.05
    """A checkpoint costs nothing while it takes a twentieth of the time between two of them."""
    creep_share: float = 0.05
    """Growth over the kept samples; a caching allocator settles far below it."""
    creep_bytes: int = 128 * 2**20
    creep_span_s: float = 60.0
    """Allocators still grow in the first half minute of a healthy run."""
    throttled_share: float = 0.5
    """Single samples under a thermal limit are harmless."""
    below_best: float = 0.1
    """Two healthy runs of one recipe on one kind of device differ by 2 to 3%."""
    far_below_best: float = 0.5
    """Less than half of what was reached before is never noise; the incident ran at 36%."""
    silent_s: float = 20.0
    """Ten looks of a rank's sampler missed: its process is stopped, dead, or its disk hangs."""
    stuck_s: float = 120.0
    """One phase of a step that worked before lasts this long, and 20 times its usual step."""
    stuck_steps: float = 20.0
    first_step_s: float = 1800.0
    """The first step compiles: minutes are usual, half an hour is not."""


LIMITS = Limits()
