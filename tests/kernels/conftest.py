"""The kernels on a CPU, in Triton's interpreter: `make kernel-test` brings Triton and sets TRITON_INTERPRET=1."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
