#!/usr/bin/env bash
# What a bare Debian or Ubuntu needs besides Python packages.  Does nothing where all of it is there.
set -euo pipefail
missing=()
command -v make >/dev/null || missing+=(make)
command -v git >/dev/null || missing+=(git)
command -v g++ >/dev/null || missing+=(g++)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update
  apt-get install -y --no-install-recommends "${missing[@]}"
fi
