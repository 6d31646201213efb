"""Functions replaced at run time, found by their code."""

from __future__ import annotations

import functools
import importlib
import os
import sys

import pytest
import torch

from draftsmith.provenance import patches
from draftsmith.provenance.patches import read_patches

SOURCE = """
import functools

def plain(x):
    return x + 1

def decorated():
    def around(f):
        @functools.wraps(f)
        def inner(*a):
            return f(*a)
        return inner
    return around

@decorated()
def wrapped(x):
    return x

class Thing:
    def method(self):
        return 1

    @property
    def value(self):
        return 2

    @staticmethod
    def static():
        return 3

    @classmethod
    def cls(cls):
        return 4
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of its own, audited; restored afterwards."""
    (tmp_path / "audited_module.py").write_text(SOURCE)
    os.utime(tmp_path / "audited_module.py", (1e9, 1e9))  # older than this process
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = importlib.import_module("audited_module")
    yield loaded
    del sys.modules["audited_module"]


def found(module) -> set[str]:
    return {name.removeprefix("audited_module.") for name in patches.audit("audited_module")}


def stranger(*a):
    return 0


def test_torch_and_transformers_as_they_are(target):
    seen = read_patches()
    assert not seen["replaced"] and not seen["not_audited"]
    assert {"torch.fx._symbolic_trace", "torch.nn.modules.module", "transformers.masking_utils"} <= set(seen["audited"])
    assert "transformers.models.qwen3.modeling_qwen3" in seen["audited"], "the target's own modeling file"


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (torch.fx._symbolic_trace.Tracer, "trace"), (torch.nn.functional, "cross_entropy"),
        (torch.nn.functional, "scaled_dot_product_attention"), (torch, "matmul"), (torch.nn.Module, "__call__"),
        (torch.nn.utils.clip_grad, "clip_grad_norm_"), (torch.optim.AdamW, "__init__"),
    ],
)  # fmt: skip
def test_a_replaced_function_of_torch(monkeypatch, holder, name):
    monkeypatch.setattr(holder, name, stranger)
    (field,) = (seen := read_patches()["replaced"])
    assert field.endswith(f".{name}") and "stranger" in seen[field]["by"] and __file__ in seen[field]["by"]
    assert "def stranger" in seen[field]["text"]


def test_a_wrapper_that_pretends_to_be_the_original(monkeypatch):
    original = torch.nn.functional.cross_entropy

    @functools.wraps(original)
    def wrapper(*a, **k):
        return original(*a, **k)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", wrapper)
    assert list(read_patches()["replaced"]) == ["torch.nn.functional.cross_entropy"]


def test_nothing_is_found_where_nothing_was_replaced(module):
    assert found(module) == set()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("plain", stranger), ("wrapped", stranger), ("Thing.method", stranger), ("Thing.value", property(stranger)),
        ("Thing.static", staticmethod(stranger)), ("Thing.cls", classmethod(stranger)),
        ("plain", functools.partial(stranger, 1)), ("plain", eval("lambda x: x")),
    ],
)  # fmt: skip
def test_every_kind_of_function(module, path, value):
    outer, _, name = path.rpartition(".")
    setattr(getattr(module, outer) if outer else module, name, value)
    assert found(module) == {path}


def test_a_replaced_class(module):
    module.Thing = type("Thing", (), {"method": stranger, "__module__": "somebody.elses"})
    seen = patches.audit("audited_module")
    assert seen["audited_module.Thing"]["by"] == "replaced by class somebody.elses.Thing"


def test_code_edited_in_memory(module):
    """Name and file are right, only the code is not."""
    changed = compile(SOURCE.replace("x + 1", "x + 2"), module.__file__, "exec")
    module.plain.__code__ = patches.definitions(changed)["plain"][0]
    seen = patches.audit("audited_module")
    assert set(seen) == {"audited_module.plain"} and "edited in memory: plain" in seen["audited_module.plain"]["by"]


def test_a_file_edited_while_the_process_runs_replaces_nothing(module):
    """Somebody goes on working on the source: the process runs what it imported.  A stranger is still found."""
    with open(module.__file__, "w") as out:
        out.write(SOURCE.replace("x + 1", "x + 2"))
    assert found(module) == set()
    module.wrapped = stranger
    assert found(module) == {"wrapped"}


def test_moving_a_function_within_its_file_is_no_change(module):
    with open(module.__file__, "w") as out:
        out.write("# a comment more\n\n" + SOURCE)
    os.utime(module.__file__, (1e9, 1e9))
    assert found(module) == set()


def test_a_module_without_source_is_said(monkeypatch):
    monkeypatch.setattr(patches, "MODULES", ("itertools_like",))
    monkeypatch.setitem(sys.modules, "itertools_like", type(sys)("itertools_like"))
    assert "itertools_like" in read_patches()["not_audited"]
