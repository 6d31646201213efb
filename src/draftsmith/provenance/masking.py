"""Secrets never reach a manifest: they are masked by the name of a variable and by the shape of a value.

What is masked leaves `<masked SALT:HASH>`: equal secrets give equal masks under one salt, so that two runs stay
comparable; masks under different salts (another user, another HOME) are not comparable and count as unknown.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Any

from draftsmith import env

MASK = re.compile(r"<masked ([0-9a-f]{6}):([0-9a-f]{12})>")

ANYWHERE = {"SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "APIKEY", "PASSPHRASE", "COOKIE"}
AT_THE_END = {"TOKEN", "TOKENS", "KEY", "KEYS", "PASS", "PW", "PWD", "AUTH", "DSN", "SIGNATURE", "BEARER"}
PAIRS = re.compile(r"(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION|ACCOUNT)_KEY")
HARMLESS = {"PWD", "OLDPWD"}

SHAPES = tuple(
    re.compile(p)
    for p in (
        r"(?P<secret>\bhf_[A-Za-z0-9]{16,})",
        r"(?P<secret>\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,})",
        r"(?P<secret>\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,})",
        r"(?P<secret>\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,})",
        r"(?P<secret>\bglpat-[A-Za-z0-9_-]{16,}|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bpypi-[A-Za-z0-9_-]{20,})",
        r"(?P<secret>\bnvapi-[A-Za-z0-9_-]{20,}|\bnpm_[A-Za-z0-9]{30,}|\bdop_v1_[0-9a-f]{40,})",
        r"(?P<secret>\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b)",
        r"(?P<secret>\bAIza[0-9A-Za-z_-]{30,}|\bya29\.[0-9A-Za-z_-]{20,})",
        r"(?P<secret>\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)",
        r"(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
        r"(?i)\b(?:bearer|basic)\s+(?P<secret>[A-Za-z0-9._~+/-]{12,}=*)",
        r"[a-z][a-z0-9+.-]*://(?P<secret>[^\s/@:'\"]*:[^\s/@'\"]+|[^\s/@:'\"]{12,})(?=@)",
        r"(?i)[?&](?:[a-z_-]*token|[a-z_-]*key|sig|[a-z-]*signature|x-amz-credential|password)=(?P<secret>[^&\s'\"]{6,})",
        r"(?i)\b(?:accountkey|sharedaccesskey)=(?P<secret>[^;\s'\"]{8,})",
        # NAME = "literal with a digit": a secret written into source or a config
        r"(?i)\b[a-z_-]*(?:api[_-]?key|secret|password|passwd|credential|_token|access[_-]?key)[a-z_-]*['\"]?\s*[:=]\s*"
        r"['\"](?P<secret>(?=[^'\"]*\d)[^'\"\s]{10,})['\"]",
    )
)
ASSIGNED = re.compile(r"(?i)\b(?:password|passwd|pwd|secret|token|api[_-]?key)=(?P<secret>[^\s;&'\"]{4,})")
"""Only outside source code, where `token=value` is no secret."""


class Masker:
    """Masks with one salt of 16 bytes."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.name = hashlib.sha256(salt).hexdigest()[:6]

    def mask(self, value: str) -> str:
        if MASK.fullmatch(value):
            return value
        return f"<masked {self.name}:{hmac.new(self.salt, value.encode(), hashlib.sha256).hexdigest()[:12]}>"

    def text(self, value: str, *, source: bool = False) -> str:
        """Mask what looks like a secret inside a text.  source: it is program text."""
        for shape in SHAPES if source else (*SHAPES, ASSIGNED):
            value = shape.sub(self._replace, value)
        return value

    def named(self, name: str, value: str) -> str:
        """Mask the whole value if its name says that it is a secret, else what looks like one inside it."""
        return self.mask(value) if value and secret_name(name) else self.text(value)

    def arguments(self, argv: list[str]) -> list[str]:
        """A command line: `--key VALUE` and `key=VALUE`."""
        out: list[str] = []
        for i, argument in enumerate(argv):
            name, equals, value = argument.partition("=")
            before = argv[i - 1] if i else ""
            if before.startswith("-") and "=" not in before and secret_name(before) and not argument.startswith("-"):
                out.append(self.mask(argument))
            elif equals and secret_name(name):
                out.append(f"{name}={self.mask(value)}")
            else:
                out.append(self.text(argument))
        return out

    def tree(self, value: Any, name: str = "", *, by_name: bool = False) -> Any:
        """Every string of a JSON tree; by_name: also by the keys above it.  Texts of programs are under the keys
        `diff`, `text` and `traceback`."""
        if isinstance(value, dict):
            return {k: self.tree(v, str(k), by_name=by_name) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(v, name, by_name=by_name) for v in value]
        if not isinstance(value, str):
            return value
        if by_name:
            return self.named(name, value)
        return self.text(value, source=name in ("diff", "text", "traceback"))

    def _replace(self, match: re.Match[str]) -> str:
        start, end = match.span("secret")
        whole, offset = match.group(0), match.start()
        return whole[: start - offset] + self.mask(match.group("secret")) + whole[end - offset :]


def secret_name(name: str) -> bool:
    """HF_TOKEN, --api-key, AWS_SECRET_ACCESS_KEY; not TOKENIZERS_PARALLELISM, max_new_tokens or PWD."""
    upper = name.strip("-").upper().replace("-", "_").replace(".", "_")
    if upper in HARMLESS or upper.startswith("MAX_"):
        return False
    words = upper.split("_")
    ends = words[-1] in AT_THE_END or upper.endswith(("APIKEY", "TOKEN", "PASSWORD", "SECRET"))
    return ends or bool(ANYWHERE.intersection(words)) or bool(PAIRS.search(upper))


def masker() -> Masker:
    """With this user's salt, made on first use, readable by the user alone; a throw-away one if it cannot be kept."""
    path = env.cache_dir() / "salt"
    try:
        if not path.exists():
            _make_salt(path)
        return Masker(bytes.fromhex(path.read_text().strip()))
    except (OSError, ValueError):
        return Masker(secrets.token_bytes(16))


def _make_salt(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".salt.{secrets.token_hex(4)}")
    temporary.touch(mode=0o600)
    temporary.write_text(secrets.token_hex(16))
    try:
        os.link(temporary, path)  # unlike a rename it never replaces the salt another process has just made
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
