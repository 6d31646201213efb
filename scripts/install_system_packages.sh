#!/usr/bin/env bash
# What a bare Debian or Ubuntu needs besides Python packages.  Does nothing where all of it is there.
set -euo pipefail
missing=() wanted=()
command -v make >/dev/null || missing+=(make)
command -v git >/dev/null || missing+=(git)
command -v g++ >/dev/null || missing+=(g++)              # torch.compile on a CPU
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
python3 -c 'import os, sysconfig as s; assert os.path.exists(s.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
command -v ip >/dev/null || wanted+=(iproute2)           # a test across two network namespaces, else skipped
command -v chromium >/dev/null || wanted+=(chromium)     # a test that opens the report, else skipped
if [ $((${#missing[@]} + ${#wanted[@]})) -gt 0 ]; then
  apt-get update
fi
if [ ${#missing[@]} -gt 0 ]; then
  apt-get install -y --no-install-recommends "${missing[@]}"
fi
if [ ${#wanted[@]} -gt 0 ]; then
  apt-get install -y --no-install-recommends "${wanted[@]}" || echo "not installed: ${wanted[*]}; their tests are skipped"
fi
