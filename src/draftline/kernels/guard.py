"""Every kernel that Triton compiles or loads is noted by name; once a run is warm, a further one is an error.

A kernel is compiled for its constants and for what Triton sees in its arguments (types, and whether a number or an
address divides by 16). After warm-up all of that has been seen, so a new one means a shape that should not be there.
"""

from __future__ import annotations

from typing import Any

from draftline.errors import RunError


class KernelGuard:
    """Watches this process's kernels from `watch` on. Triton holds one such hook in a process."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.warm = False

    def watch(self) -> None:
        """Needs Triton. From now on every kernel that is not in memory yet calls `note`, before it is compiled."""
        import triton

        triton.knobs.runtime.jit_cache_hook = self.note

    def note(self, *, repr: str, **_: Any) -> None:
        """`repr`: Triton's own text of the kernel, its constants and its arguments' types."""
        if self.warm:
            raise RunError(
                f"after warm-up a step asked for a kernel that is not compiled: {repr}",
                "this is never right, and a run that compiles as it goes limps: report it with the recipe and the "
                f"run's events.jsonl ({len(self.names)} kernels were compiled in warm-up)",
            )
        self.names.append(repr)

    def seal(self) -> None:
        """The run is warm: no further kernel."""
        self.warm = True
