"""Two hosts as two torchrun agents on loopback, features between them through torch.distributed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from command import draftline_here
from runs import assert_same_bits, write_recipe

LAST = Path("checkpoints/step-0000008")
WORKER = """
import os, signal, sys
from draftline.cli import main
from draftline.target.capture import FeatureCapture
whole, calls = FeatureCapture.__call__, []
def capture(self, packed):
    calls.append(1)
    if len(calls) == 15 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, packed)
FeatureCapture.__call__ = capture
main()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_agents_restart_together_and_train_the_same_bits(tmp_path: Path) -> None:
    """The capturing rank is killed in the first attempt; both agents start their ranks again, from the checkpoint."""
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    assert draftline_here("train", recipe, f"train.out={tmp_path / 'one'}").code == 0
    (tmp_path / "worker.py").write_text(WORKER)
    port = free_port()
    agent = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1",
        "--rdzv-id", "two", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr",
        "127.0.0.1", str(tmp_path / "worker.py"), "train", str(recipe), f"train.out={run}", "placement.kind=split",
        "placement.targets=1", "placement.drafters=1", "placement.channel_gib=5.0e-5",
    ]  # fmt: skip
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [(tmp_path / f"agent{host}.log").open("w+") for host in range(2)]
    agents = [subprocess.Popen(agent, stdout=log, stderr=log, env=environment, cwd=tmp_path) for log in logs]
    codes = [process.wait(timeout=240) for process in agents]
    said = "".join((tmp_path / f"agent{host}.log").read_text() for host in range(2))
    assert codes == [0, 0], said
    assert "SIGKILL" in said or "exitcode: -9" in said
    assert_same_bits(run / LAST, tmp_path / "one" / LAST)
