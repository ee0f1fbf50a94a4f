"""Memory that is still free: on a GPU, or on the host within its container's limit."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(device: torch.device) -> int | None:
    """Bytes that this process can still take on `device`; None where the system does not say.

    On CUDA: free there, and what torch's allocator holds without using it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [limit for limit in (host_available_bytes(), container_left_bytes()) if limit is not None]
    return min(limits, default=None)


def host_available_bytes() -> int | None:
    if not MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def container_left_bytes() -> int | None:
    """What a version 2 control group leaves; file caches count as free, since they give way."""
    limit, used, kinds = (CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if not (limit.is_file() and used.is_file() and kinds.is_file()) or limit.read_text().strip() == "max":
        return None
    cache = next((int(line.split()[1]) for line in kinds.read_text().splitlines() if line.startswith("file ")), 0)
    return int(limit.read_text()) - int(used.read_text()) + cache
