"""GPUs as NVIDIA's own library sees them, through ctypes: nothing to install, works before and without torch."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.provenance.facts import attempt, unknown, why_unknown

LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED, UNINITIALIZED = 3, 1
THROTTLE = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons in which clocks are held down; idle, application clocks, sync boost and display are not among them."""
SERIOUS = frozenset(THROTTLE.values()) - {"software power cap"}
"""A card at full load often reaches its own power cap: that is not a fault of the machine."""
SECONDS = 5.0
"""NVML can hang on a card that has failed; then the GPUs are unknown and the run goes on."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The calls used here.  A query gives its value, "not supported", or an unknown with NVML's own words."""

    def __init__(self, library: str = LIBRARY) -> None:
        self.lib = ctypes.CDLL(library)
        self.lib.nvmlErrorString.restype = ctypes.c_char_p
        code = self.lib.nvmlInit_v2()
        if code:
            raise OSError(f"nvmlInit: {self.words(code)}")

    def words(self, code: int) -> str:
        return (self.lib.nvmlErrorString(code) or b"error %d" % code).decode()

    def get(self, name: str, kind: type, *before: Any, fields: tuple[str, ...] = ()) -> Any:
        """Call `name(*before, &value)`; fields: for a struct, the fields to return."""
        function = getattr(self.lib, name, None)
        if function is None:
            return unknown(f"this driver has no {name}")
        value = kind()
        code = function(*before, ctypes.byref(value))
        if code:
            return "not supported" if code == NOT_SUPPORTED else unknown(f"{name}: {self.words(code)}")
        return {f: getattr(value, f) for f in fields} if fields else value.value

    def number(self, name: str, *before: Any) -> Any:
        return self.get(name, ctypes.c_uint, *before)

    def pair(self, name: str, device: Any) -> Any:
        """Two values, current and pending: only the first counts."""
        first, second = ctypes.c_uint(), ctypes.c_uint()
        code = getattr(self.lib, name)(device, ctypes.byref(first), ctypes.byref(second))
        if code:
            return "not supported" if code == NOT_SUPPORTED else unknown(f"{name}: {self.words(code)}")
        return first.value

    def text(self, name: str, *before: Any) -> Any:
        buffer = ctypes.create_string_buffer(256)
        code = getattr(self.lib, name)(*before, buffer, ctypes.c_uint(256))
        return buffer.value.decode() if code == 0 else unknown(f"{name}: {self.words(code)}")

    def devices(self) -> list[Any]:
        handles = []
        for index in range(int(self.number("nvmlDeviceGetCount_v2"))):
            handle = ctypes.c_void_p()
            code = self.lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            if code:
                raise OSError(f"GPU {index}: {self.words(code)}")
            handles.append(handle)
        return handles

    def processes(self, device: Any) -> Any:
        """[(pid, bytes or None)] of every process that computes on the device."""
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        count = ctypes.c_uint(256)
        found = (_Process * 256)()
        code = getattr(self.lib, name)(device, ctypes.byref(count), found)
        if code:
            return "not supported" if code == NOT_SUPPORTED else unknown(f"{name}: {self.words(code)}")
        return [(p.pid, None if p.used == 2**64 - 1 else p.used) for p in found[: count.value]]

    def throttle(self, device: Any) -> Any:
        """Reasons why its clocks are held down now."""
        mask = self.get("nvmlDeviceGetCurrentClocksEventReasons", ctypes.c_ulonglong, device)
        if isinstance(mask, dict):  # older drivers
            mask = self.get("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong, device)
        return [words for bit, words in THROTTLE.items() if mask & bit] if isinstance(mask, int) else mask

    def close(self) -> None:
        self.lib.nvmlShutdown()


def read_gpus(library: str = LIBRARY) -> dict[str, Any]:
    """{"driver", "cuda", "devices": [...]}; no devices and the reason where there is no NVIDIA driver."""
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists() and library == LIBRARY:
        return {"driver": None, "cuda": None, "devices": [], "why": "no NVIDIA driver on this machine"}
    return _in_time(lambda: _with_nvml(library, _describe))


def sample(before: Any, library: str = LIBRARY) -> list[dict[str, Any]]:
    """What changes while a run goes on, gathered over all samples so far: throttle reasons, highest temperature."""

    def read(nvml: Nvml) -> list[dict[str, Any]]:
        celsius, out = ctypes.c_uint(0), []
        for index, device in enumerate(nvml.devices()):
            seen: dict[str, Any] = before[index] if isinstance(before, list) else {"throttle": [], "celsius_max": 0}
            reasons, degrees = nvml.throttle(device), nvml.number("nvmlDeviceGetTemperature", device, celsius)
            out.append(
                {
                    "throttle": sorted({*seen["throttle"], *(reasons if isinstance(reasons, list) else [])}),
                    "celsius_max": max(seen["celsius_max"], degrees if isinstance(degrees, int) else 0),
                }
            )
        return out

    return list(_with_nvml(library, read))


def _with_nvml(library: str, read: Callable[[Nvml], Any]) -> Any:
    nvml = Nvml(library)
    try:
        return read(nvml)
    finally:
        nvml.close()


def _describe(nvml: Nvml) -> dict[str, Any]:
    cuda = nvml.get("nvmlSystemGetCudaDriverVersion_v2", ctypes.c_int)
    return {
        "driver": nvml.text("nvmlSystemGetDriverVersion"),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else cuda,
        "devices": [_device(nvml, device) for device in nvml.devices()],
    }


def _device(nvml: Nvml, device: Any) -> dict[str, Any]:
    graphics, streaming, memory = (ctypes.c_uint(i) for i in (0, 1, 2))
    return {
        "name": nvml.text("nvmlDeviceGetName", device),
        "uuid": nvml.text("nvmlDeviceGetUUID", device),
        "ecc": nvml.pair("nvmlDeviceGetEccMode", device),
        "mig": nvml.pair("nvmlDeviceGetMigMode", device),
        "persistence": nvml.number("nvmlDeviceGetPersistenceMode", device),
        "compute_mode": nvml.number("nvmlDeviceGetComputeMode", device),
        "power_limit_mw": nvml.number("nvmlDeviceGetPowerManagementLimit", device),
        "power_default_mw": nvml.number("nvmlDeviceGetPowerManagementDefaultLimit", device),
        "clock_max_mhz": [nvml.number("nvmlDeviceGetMaxClockInfo", device, c) for c in (streaming, memory)],
        "clock_application_mhz": [nvml.number("nvmlDeviceGetApplicationsClock", device, c) for c in (graphics, memory)],
        "pcie_width": nvml.number("nvmlDeviceGetCurrPcieLinkWidth", device),
        "pcie_generation_max": nvml.number("nvmlDeviceGetMaxPcieLinkGeneration", device),
        "nvlinks_active": _nvlinks(nvml, device),
        "throttle": nvml.throttle(device),
        "memory": _memory(nvml, device),
        "processes": nvml.processes(device),
        "others_bytes": _others(nvml, device),
    }


def _others(nvml: Nvml, device: Any) -> Any:
    """Memory in use that is not this process's own."""
    memory, processes = _memory(nvml, device), nvml.processes(device)
    if not isinstance(processes, list) or why_unknown(memory):
        return memory if why_unknown(memory) else unknown(f"its processes: {processes}")
    own = sum(used or 0 for pid, used in processes if pid == os.getpid())
    torch: Any = sys.modules.get("torch")
    if not own and torch is not None and torch.cuda.is_initialized():  # a container, in which pids are others
        return unknown("this process uses the card already, and cannot be told from others")
    return memory["used"] - own


def _memory(nvml: Nvml, device: Any) -> Any:
    return nvml.get("nvmlDeviceGetMemoryInfo", _Memory, device, fields=("total", "used"))


def _nvlinks(nvml: Nvml, device: Any) -> int:
    states = (nvml.number("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(link)) for link in range(18))
    return sum(state == 1 for state in states)


def _in_time(read: Callable[[], Any]) -> Any:
    """The result, or an unknown if it does not come in time; the waiting thread is left behind."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(attempt(read)), name="nvml", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return box[0] if box else unknown(f"NVML did not answer in {SECONDS:.0f} s")
