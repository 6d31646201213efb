"""The capture as one file that runs in any Python 3.10 or newer, without this package: in a serving environment, say.

    draftsmith runs capture-file capture.pyz
    /opt/sglang/bin/python capture.pyz OUT.json --load torch,sglang

It is a zip archive of the modules that capture.py imports, which Python runs as they are.  Inside a running process:
`sys.path.insert(0, "capture.pyz")`, then `draftsmith.provenance.capture.right_now("serving", {})`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
MODULES = (
    "__init__", "env", "errors", "files", "provenance/__init__", "provenance/artifacts", "provenance/caches",
    "provenance/capture", "provenance/digests", "provenance/facts", "provenance/gpu", "provenance/host",
    "provenance/masking", "provenance/packages", "provenance/patches", "provenance/source", "provenance/torchstate",
)  # fmt: skip
MAIN = "import sys\nfrom draftsmith.provenance.capture import main\nsys.exit(main())\n"
THEN = (1980, 1, 1, 0, 0, 0)
"""One time for all entries: the same source gives the same archive."""


def write_standalone(path: Path) -> None:
    with open(path, "wb") as out:
        out.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo("__main__.py", THEN), MAIN)
            for name in MODULES:
                content = (PACKAGE / f"{name}.py").read_bytes()
                archive.writestr(zipfile.ZipInfo(f"draftsmith/{name}.py", THEN), content)
    path.chmod(0o755)
