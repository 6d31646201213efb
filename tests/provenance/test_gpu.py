"""GPUs through ctypes: a stand-in for NVML, written in C, answers as the real library does."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from draftsmith.provenance import gpu
from draftsmith.provenance.view import table

NVML = r"""
#include <string.h>
#include <unistd.h>
typedef unsigned int u; typedef unsigned long long ull;
typedef struct { ull total, free, used; } memory; typedef struct { u pid; ull used; u gi, ci; } process;
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "some error"; }
int nvmlSystemGetDriverVersion(char *out, u n) { strncpy(out, "580.1", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return 0; }
int nvmlDeviceGetCount_v2(u *out) { if (HANG) sleep(3); *out = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u i, void **out) { *out = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetName(void *d, char *out, u n) { strncpy(out, "NVIDIA H200", n); return 0; }
int nvmlDeviceGetUUID(void *d, char *out, u n) { strncpy(out, "GPU-1", n); return 0; }
int nvmlDeviceGetEccMode(void *d, u *now, u *next) { *now = 1; *next = 0; return 0; }
int nvmlDeviceGetMigMode(void *d, u *now, u *next) { return 3; }
int nvmlDeviceGetPersistenceMode(void *d, u *out) { *out = 1; return 0; }
int nvmlDeviceGetComputeMode(void *d, u *out) { *out = 0; return 0; }
int nvmlDeviceGetPowerManagementLimit(void *d, u *out) { return POWER; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, u *out) { *out = 700000; return 0; }
int nvmlDeviceGetMaxClockInfo(void *d, u kind, u *out) { *out = kind == 1 ? 1980 : 3201; return 0; }
int nvmlDeviceGetApplicationsClock(void *d, u kind, u *out) { *out = kind == 0 ? 1980 : 3201; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, u *out) { *out = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, u *out) { *out = 5; return 0; }
int nvmlDeviceGetNvLinkState(void *d, u link, u *out) { *out = link < 12; return 0; }
int nvmlDeviceGetTemperature(void *d, u sensor, u *out) { *out = 60; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, ull *out) { *out = THROTTLE; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, memory *m) { m->total = 150ull << 30; m->used = 21ull << 30; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, u *n, process *p) {
    p[0].pid = 4000000; p[0].used = 19ull << 30; p[1].pid = getpid(); p[1].used = 2ull << 30; *n = 2; return 0; }
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A stand-in with some answers changed; its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")

    def make(name: str, **answers: int) -> str:
        given = {"INIT": 0, "HANG": 0, "POWER": 0, "THROTTLE": 0x1, **answers}
        library = folder / f"{name}.so"
        flags = [f"-D{k}={v}" for k, v in given.items()]
        command = [compiler, "-shared", "-fPIC", "-w", *flags, "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=NVML, text=True, check=True)
        return str(library)

    return make


def test_every_figure_of_a_card(build):
    found = gpu.read_gpus(build("plain"))
    assert (found["driver"], found["cuda"], len(found["devices"])) == ("580.1", "13.0", 2)
    card = found["devices"][0]
    assert (card["name"], card["ecc"], card["mig"], card["nvlinks_active"]) == ("NVIDIA H200", 1, "not supported", 12)
    assert card["clock_max_mhz"] == [1980, 3201] and card["throttle"] == [], "idle is no throttling"
    assert card["others_bytes"] == 19 << 30, "what is in use, less this process's own"
    fields = table({"gpu": found, "python": {}})
    assert fields["gpu.others"].value == "2 x 19 GiB of its memory" and fields["gpu.pcie"].value.endswith(
        "generation 5"
    )
    assert fields["gpu.name"].value == "2 x NVIDIA H200" and fields["gpu.driver"].value == "580.1 (CUDA 13.0)"


def test_throttling_now_and_meanwhile(build):
    hot = gpu.read_gpus(build("hot", THROTTLE=0x4 | 0x20))
    assert hot["devices"][0]["throttle"] == ["software power cap", "software thermal slowdown"]
    assert table({"gpu": hot, "python": {}})["gpu.throttled"].value == "2 x software thermal slowdown"
    samples = gpu.sample(gpu.sample(None, build("braked", THROTTLE=0x80)), build("cool"))
    assert samples[0] == {"throttle": ["power brake"], "celsius_max": 60}, "what was seen once stays"
    cool = gpu.read_gpus(build("cool"))
    assert table({"gpu": cool, "gpu_samples": samples, "python": {}})["gpu.throttled"].value == "2 x power brake"


def test_an_error_is_unknown_with_its_words(build):
    found = gpu.read_gpus(build("lost", POWER=15))
    assert found["devices"][0]["power_limit_mw"] == {"unknown": "nvmlDeviceGetPowerManagementLimit: GPU is lost"}
    fields = table({"gpu": found, "python": {}})
    assert fields["gpu.name"].value and not fields["gpu.driver"].unknown


def test_a_library_that_does_not_start(build):
    assert gpu.read_gpus(build("dead", INIT=9)) == {"unknown": "OSError: nvmlInit: some error"}
    assert "cannot open shared object" in gpu.read_gpus("libno-such-nvml.so")["unknown"]


def test_a_library_that_hangs(build, monkeypatch):
    monkeypatch.setattr(gpu, "SECONDS", 0.2)
    assert gpu.read_gpus(build("hung", HANG=1)) == {"unknown": "NVML did not answer in 0 s"}


def test_no_driver_is_a_fact_and_not_unknown():
    found = gpu.read_gpus()
    assert found["devices"] or found["why"] == "no NVIDIA driver on this machine"


@pytest.mark.gpu
def test_on_a_real_card():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = gpu.read_gpus()
    assert len(found["devices"]) >= 1 and found["devices"][0]["name"] == torch.cuda.get_device_name(0)
    unknown = {k: v for k, v in found["devices"][0].items() if isinstance(v, dict) and "unknown" in v}
    assert not unknown and gpu.sample(None)[0]["celsius_max"] > 0
