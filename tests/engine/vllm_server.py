"""vLLM's OpenAI-compatible server on a free loopback port, as a user starts it, for the length of a `with`."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from draftline.environment import variables

START_LIMIT_S = 300
END_LIMIT_S = 20


@contextmanager
def vllm_server(interpreter: str, words: list[str], log: Path) -> Iterator[str]:
    """The root URL of a server that answers. Its processes form a group of their own, which is ended here."""
    port = free_port()
    command = [interpreter, "-I", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", str(port), *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables.for_child(settings),
            start_new_session=True,
        )
    try:
        root = f"http://127.0.0.1:{port}"
        wait_until_healthy(server, root, log)
        yield root
    finally:
        end_group(server)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: subprocess.Popen[bytes], root: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while not is_healthy(root):
        fault = "ended" if server.poll() is not None else "is late" if time.monotonic() > deadline_s else None
        assert fault is None, f"the server {fault}; its last words:\n{log.read_text()[-2000:]}"
        time.sleep(0.5)


def is_healthy(root: str) -> bool:
    try:
        with urllib.request.urlopen(f"{root}/health", timeout=5):
            return True
    except (URLError, TimeoutError, ConnectionError):
        return False


def end_group(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, which ends its workers; SIGKILL to what is left of its group."""
    server.terminate()
    try:
        server.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
