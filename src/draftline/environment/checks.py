"""Checks of a machine that need no training code: versions that fit together, switches, disk and shared memory."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import pynvml
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from draftline.environment.device import OLDEST_CAPABILITY
from draftline.environment.switches import changed_switches, danger_of
from draftline.environment.variables import cache_home

Status = Literal["ok", "warn", "fail"]
GIB = 2**30
LOWEST = {"torch": "2.11", "transformers": "5"}
DISK_FAIL_GIB, DISK_WARN_GIB = 2, 50  # a small run's checkpoints; several checkpoints of a 2 G-parameter drafter
SHM_FAIL_GIB, SHM_WARN_GIB = 0.06, 2  # containers often have 64 MiB, less than one feature batch
NETWORK_FILESYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "ceph",
    "glusterfs",
    "beegfs",
    "fuse.sshfs",
    "gpfs",
    "9p",
}


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    found: str
    remedy: str = ""  # given unless all is well


def software_checks() -> Iterator[Check]:
    """Versions against what draftline needs, and torch's own pins against what is installed."""
    yield Check("python", "ok", platform.python_version())
    for name, lowest in LOWEST.items():
        found = metadata.version(name)
        if Version(found) >= Version(lowest):
            yield Check(name, "ok", found)
        else:
            yield Check(name, "fail", f"{found}; draftline needs {lowest} or newer", f"pip install '{name}>={lowest}'")
    yield pins_check()
    yield switches_check()


def pins_check() -> Check:
    """What torch was built with (Triton, the CUDA libraries) must be installed in exactly those versions."""
    pins = dict(torch_pins())
    wrong = [
        f"{name} {found or 'missing'}, wanted {pin}" for name, (pin, found) in pins.items() if not fits(pin, found)
    ]
    if wrong:
        return Check("torch's pins", "fail", "; ".join(wrong), "install torch again with its dependencies")
    return Check(
        "torch's pins", "ok", f"{len(pins)} packages, all as torch wants them" if pins else "none: a CPU build"
    )


def torch_pins() -> Iterator[tuple[str, tuple[str, str | None]]]:
    """(package, (pinned versions, installed version or None)) for each `==` among torch's requirements."""
    for line in metadata.requires("torch") or []:
        wanted = Requirement(line)
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if applies and "==" in str(wanted.specifier):
            yield wanted.name, (str(wanted.specifier), installed(wanted.name))


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fits(pin: str, found: str | None) -> bool:
    return found is not None and found in Requirement(f"x{pin}").specifier


def switches_check() -> Check:
    """Whatever this process's environment already changes in torch's compiler."""
    changed = changed_switches()
    if not changed:
        return Check("torch switches", "ok", "all at torch's defaults")
    listed = "; ".join(f"{name}={value}: {danger_of(name)}" for name, value in changed.items())
    return Check("torch switches", "warn", listed, "unset them, or declare them in the recipe's overrides")


def gpu_checks() -> Iterator[Check]:
    """GPU, driver and the CUDA that torch was built for."""
    names, driver, newest_cuda = nvml_view()
    built_for = torch.version.cuda
    if not names:
        yield Check("gpu", "ok", "none: draftline runs on the CPU here")
        return
    if built_for is None:
        remedy = "install torch's CUDA build: see pytorch.org"
        yield Check("gpu", "fail", f"{', '.join(names)}, but torch {torch.__version__} is built without CUDA", remedy)
        return
    yield driver_check(driver, newest_cuda, built_for)
    if not torch.cuda.is_available():
        remedy = "check CUDA_VISIBLE_DEVICES, the container's GPU access and `nvidia-smi`"
        yield Check("gpu", "fail", f"{', '.join(names)}, but torch sees none", remedy)
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield architecture_check(names, torch.cuda.get_device_capability(), torch.cuda.get_arch_list())


def nvml_view() -> tuple[list[str], str, int]:
    """(names of the GPUs, driver version, newest CUDA it serves as 1000 * major + 10 * minor), empty without NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], "none", 0
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        return names, str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlSystemGetCudaDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def driver_check(driver: str, newest_cuda: int, built_for: str) -> Check:
    """A driver serves every CUDA of its own major version and all older ones (CUDA's compatibility rule)."""
    major, minor = newest_cuda // 1000, newest_cuda % 1000 // 10
    wanted_major, wanted_minor = (int(part) for part in built_for.split(".")[:2])
    found = f"{driver} serves CUDA {major}.{minor}; torch is built for {built_for}"
    if major < wanted_major:
        return Check("driver", "fail", found, f"update the driver, or install torch for CUDA {major}.x")
    if (major, minor) < (wanted_major, wanted_minor):
        return Check(
            "driver", "warn", found, "works within one major version; update the driver for the newest kernels"
        )
    return Check("driver", "ok", found)


def architecture_check(names: list[str], capability: tuple[int, int], built: list[str]) -> Check:
    """names: of every GPU; capability: the first one's; built: the architectures that torch was built for, "sm_90"."""
    major, minor = capability
    found = f"{', '.join(f'{name} x{names.count(name)}' for name in sorted(set(names)))} (sm_{major}{minor})"
    if capability < OLDEST_CAPABILITY:
        return Check("gpu", "fail", f"{found}: training needs sm_80 or later", "train on another GPU, or on the CPU")
    if not any(serves(arch, capability) for arch in built):
        remedy = "install a build of torch for this GPU"
        return Check("gpu", "fail", f"{found}, and this torch is built for {', '.join(built)}", remedy)
    return Check("gpu", "ok", found)


def serves(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code built for `arch` runs on a GPU (CUDA's binary and PTX compatibility): "sm_86" on 8.6 and 8.9,
    "sm_90a" on 9.0 alone, "compute_90" on 9.0 and all later ones."""
    kind, _, number = arch.partition("_")
    built_for = divmod(int(number.rstrip("af")), 10)
    if number.endswith("a"):  # with instructions of that one GPU
        return built_for == capability
    return built_for <= capability and (kind == "compute" or built_for[0] == capability[0])


def storage_checks(run_folder: Path) -> Iterator[Check]:
    """Disk for checkpoints, a local disk for the compile cache, shared memory for feature batches."""
    yield free_check("disk", nearest(run_folder), DISK_FAIL_GIB, DISK_WARN_GIB, "checkpoints need it: free some space")
    cache = nearest(cache_home())
    kind = filesystem_of(cache)
    if kind in NETWORK_FILESYSTEMS:
        remedy = "set XDG_CACHE_HOME to a folder on a local disk: compilers lock files there"
        yield Check("compile cache", "warn", f"{cache} is on {kind}", remedy)
    else:
        yield free_check("compile cache", cache, 0.5, 2, "set XDG_CACHE_HOME to a folder on a larger local disk")
    shm = Path("/dev/shm")
    if shm.is_dir():
        remedy = "enlarge it: `docker run --shm-size=16g` or --ipc=host; in Kubernetes an emptyDir of medium Memory"
        yield free_check("shared memory", shm, SHM_FAIL_GIB, SHM_WARN_GIB, remedy)
    else:
        yield Check("shared memory", "warn", "no /dev/shm here", "several ranks on one host need it")


def free_check(name: str, folder: Path, fail_gib: float, warn_gib: float, remedy: str) -> Check:
    free_gib = shutil.disk_usage(folder).free / GIB
    status: Status = "fail" if free_gib <= fail_gib else "warn" if free_gib <= warn_gib else "ok"
    return Check(name, status, f"{free_gib:,.1f} GiB free at {folder}", "" if status == "ok" else remedy)


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def filesystem_of(folder: Path) -> str:
    """Type of the file system that holds a folder, as /proc/mounts says; "unknown" elsewhere."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    above = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    holding = [(len(point), kind) for point, kind in mounts if point in above]
    return max(holding)[1] if holding else "unknown"
