"""Put a finished folder in another one's place so that the name never stands for half of either."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

from draftline.export.jsonfile import sync

AT_FDCWD = -100
RENAME_EXCHANGE = 2
NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def replace_folder(fresh: Path, place: Path) -> None:
    """Rename `fresh` to `place`, both in one parent folder. What was at `place` ends up at `fresh`, if anything was.

    A non-empty folder cannot be renamed over, so the two names are exchanged by one system call; on systems without it
    the earlier folder steps aside first, and comes back should the second rename fail.
    """
    if not place.exists():
        fresh.rename(place)
    elif not exchanged(fresh, place):
        step_aside(fresh, place)
    sync(place.parent)


def exchanged(one: Path, other: Path) -> bool:
    """Swap two names atomically (renameat2, Linux >= 3.15). False where kernel or filesystem does not offer it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # glibc < 2.28
        return False
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(other))


def step_aside(fresh: Path, place: Path) -> None:
    aside = fresh.with_name(fresh.name + ".earlier")
    place.rename(aside)
    try:
        fresh.rename(place)
    except OSError:
        aside.rename(place)
        raise
    aside.rename(fresh)
