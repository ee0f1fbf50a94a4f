"""Kernels compiled for GPUs that are not there: `make kernel-test` brings Triton. Its interpreter compiles nothing."""

import importlib.util
import os

compiles = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
collect_ignore_glob = [] if compiles else ["test_*.py"]
