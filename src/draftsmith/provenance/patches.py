"""Functions of imported libraries that were replaced at run time, found by comparing them with their source.

Every function and method that the source of a sensitive module defines is looked up as it is now.  Its code must be the
code that its file compiles to (taken from the .pyc that the import used, so this costs milliseconds).  A wrapper in
front of it counts too, unless it comes from a library whose decorators are part of the source.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.provenance import host
from draftsmith.provenance.facts import attempt

MODULES = (
    "torch", "torch._tensor", "torch._dynamo.convert_frame", "torch._dynamo.eval_frame", "torch._inductor.codecache",
    "torch._inductor.compile_fx", "torch.amp.autocast_mode", "torch.autograd", "torch.autograd.function",
    "torch.distributed.distributed_c10d", "torch.fx._symbolic_trace", "torch.fx.graph_module", "torch.fx.proxy",
    "torch.nn.attention", "torch.nn.attention.flex_attention", "torch.nn.functional", "torch.nn.init",
    "torch.nn.modules.activation", "torch.nn.modules.linear", "torch.nn.modules.module", "torch.nn.modules.sparse",
    "torch.nn.parallel.distributed", "torch.nn.utils.clip_grad", "torch.optim.adam", "torch.optim.adamw",
    "torch.optim.optimizer", "torch.utils.checkpoint", "transformers.integrations.sdpa_attention",
    "transformers.masking_utils", "transformers.modeling_rope_utils", "transformers.modeling_utils",
    "transformers.tokenization_utils_base", "safetensors.torch", "flash_attn.flash_attn_interface",
    "triton.compiler.compiler", "triton.runtime.jit",
)  # fmt: skip
"""Modules in which a replaced function can change numbers or speed; modeling files in use and draftsmith are added."""

ASSIGNED = (
    "torch:addmm", "torch:bmm", "torch:matmul", "torch:mm", "torch:softmax", "torch.nn.functional:linear",
    "torch.nn.functional:scaled_dot_product_attention", "torch.nn.modules.module:Module.__call__",
)  # fmt: skip
"""Names that no `def` makes (written in C++, or assigned): whatever stands there must be torch's own."""

MOST_TEXT = 10_000
"""Characters kept of the function that stands there now."""

TRUSTED = ("torch", "transformers", "tokenizers", "typing_extensions", "huggingface_hub")
"""Packages whose decorators and classes stand in front of others by right."""


def read_patches() -> dict[str, Any]:
    """{"audited": [modules], "replaced": {name: {"by", "code", "text"}}, "not_audited": {module: why}}"""
    audited, replaced, failed = [], {}, {}
    for name in sorted(_modules()):
        found = attempt(audit, name)
        if set(found) == {"unknown"}:
            failed[name] = found["unknown"]
        else:
            audited.append(name)
            replaced.update(found)
    for name in ASSIGNED:
        module, _, path = name.partition(":")
        live = _lookup(sys.modules[module], path) if module in sys.modules else None
        foreign = None if live is None else _foreign(live, "torch", set())
        if foreign:
            replaced[f"{module}.{path}"] = foreign
    return {"audited": audited, "replaced": replaced, "not_audited": failed}


def audit(name: str) -> dict[str, Any]:
    """{qualified name: what replaced it} for one loaded module."""
    module = sys.modules[name]
    package, file = name.partition(".")[0], str(module.__file__)
    # a file edited since this process began says nothing about what the process runs: only strangers can be found then
    edited = os.path.exists(file) and os.stat(file).st_mtime > host.process_began()
    defined = definitions(module.__spec__.loader.get_code(name))  # type: ignore[union-attr]
    found: dict[str, Any] = {}
    for path, codes in defined.items():
        outer, _, last = path.rpartition(".")
        holder = vars(module).get(outer.partition(".")[0]) if outer else None
        if isinstance(holder, type) and not _own_class(holder, package):
            found[f"{name}.{holder.__name__}"] = {"by": f"replaced by class {holder.__module__}.{holder.__qualname__}"}
            continue
        live, right = _lookup(module, path), set() if edited else set(map(signature, codes))
        foreign = None if live is None else _foreign(live, package, right, file, last)
        if foreign:
            found[f"{name}.{path}"] = foreign
    return found


def definitions(code: types.CodeType, prefix: str = "") -> dict[str, list[types.CodeType]]:
    """Qualified name -> code of every function and method defined at the top of a module or of a class in it.

    Several where a name is defined more than once (a property and its setter, branches of an `if`).
    """
    out: dict[str, list[types.CodeType]] = {}
    for constant in code.co_consts:
        if not isinstance(constant, types.CodeType) or constant.co_name.startswith("<"):
            continue
        path = f"{prefix}{constant.co_name}"
        if constant.co_flags & inspect.CO_OPTIMIZED:  # functions have it, class bodies do not
            out.setdefault(path, []).append(constant)
        else:
            for name, codes in definitions(constant, f"{path}.").items():
                out.setdefault(name, []).extend(codes)
    return out


def signature(code: types.CodeType) -> str:
    """What a function does, without where it stands in its file."""
    constants = [signature(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    content = (code.co_code.hex(), code.co_names, code.co_varnames, code.co_argcount, code.co_flags, constants)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _constant(value: Any) -> str:
    """Sets have no order of their own."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _modules() -> set[str]:
    loaded = list(sys.modules)
    modeling = {n for n in loaded if n.startswith("transformers.models.") and ".modeling_" in n}
    own = {n for n in loaded if n.startswith("draftsmith.") and not n.startswith("draftsmith.provenance")}
    return modeling | own | {n for n in MODULES if n in sys.modules}


def _foreign(
    live: Any, package: str, sources: set[str], file: str | None = None, name: str = ""
) -> dict[str, Any] | None:
    """What stands where the source's function should, or None if it is that function.

    sources: signatures of the right code; empty: any code of the package will do.
    """
    for layer in _layers(live):
        code = getattr(layer, "__code__", None)
        if not isinstance(code, types.CodeType):
            continue
        if signature(code) in sources:
            return None
        if not _belongs(code.co_filename, (package, *TRUSTED)):
            return _describe(layer, code, "replaced by")
        if sources and (code.co_filename, code.co_name) == (file, name):
            return _describe(layer, code, "edited in memory:")
    return None


def _layers(live: Any) -> Iterator[Any]:
    """A callable and what is inside it: properties, static and class methods, partials, functools.wraps."""
    seen = 0
    while live is not None and seen < 20:
        seen += 1
        if isinstance(live, property):
            yield from (f for f in (live.fget, live.fset, live.fdel) if f is not None)
            return
        if isinstance(live, (staticmethod, classmethod, types.MethodType)):
            live = live.__func__
        elif isinstance(live, (functools.partial, functools.partialmethod)):
            live = live.func
        else:
            yield live
            live = getattr(live, "__wrapped__", None)


@functools.cache
def _belongs(filename: str, packages: tuple[str, ...]) -> bool:
    """Is a file part of one of these packages, or of Python itself?"""
    if filename.startswith(("<frozen ", sysconfig.get_path("stdlib"))) and "site-packages" not in filename:
        return True
    for package in packages:
        file = getattr(sys.modules.get(package), "__file__", None)
        if file and filename.startswith(str(Path(file).parent) if Path(file).name == "__init__.py" else file):
            return True
    return False


def _describe(function: Any, code: types.CodeType, how: str) -> dict[str, Any]:
    where = f"{code.co_filename}:{code.co_firstlineno}"
    name = getattr(function, "__qualname__", code.co_name)
    text = attempt(inspect.getsource, code)
    kept = text[:MOST_TEXT] if isinstance(text, str) else None
    return {"by": f"{how} {name} ({where})", "code": signature(code), "text": kept}


def _own_class(live: type, package: str) -> bool:
    return live.__module__.partition(".")[0] in (package, "builtins", *TRUSTED)


def _lookup(module: Any, path: str) -> Any:
    """The object under a dotted path, as the class holds it (not bound), or None where the module has none."""
    *outer, last = path.split(".")
    holder = module
    for name in outer:
        holder = vars(holder).get(name)
        if not isinstance(holder, type):
            return holder  # a class that has become something else
    return vars(holder).get(last)
