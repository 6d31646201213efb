"""Serve a GGUF model with llama.cpp's OpenAI-compatible server; run by the python of .peers/xllamacpp.

python serve_llama.py MODEL.gguf PORT_FILE: writes its port there when it answers, and serves until it is killed.
"""

import sys
import time
from pathlib import Path

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.hostnames = ["127.0.0.1"]
params.port = 0
params.n_ctx = 4096
params.n_parallel = 4
params.cpuparams.n_threads = 1
params.warmup = False
server = xllamacpp.Server(params)
Path(sys.argv[2] + ".tmp").write_text(server.listening_address)
Path(sys.argv[2] + ".tmp").rename(sys.argv[2])
while True:
    time.sleep(1)
