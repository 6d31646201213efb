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
from collections.abc import Callable
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
        r"(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
        r"(?P<secret>\bhf_[A-Za-z0-9]{16,}|\bwandb_v1_[A-Za-z0-9_-]{8,})",
        r"(?P<secret>\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,})",
        r"(?P<secret>\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,})",
        r"(?P<secret>\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,})",
        r"(?P<secret>\bglpat-[A-Za-z0-9_-]{16,}|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bpypi-[A-Za-z0-9_-]{20,})",
        r"(?P<secret>\bnvapi-[A-Za-z0-9_-]{20,}|\bnpm_[A-Za-z0-9]{30,}|\bdop_v1_[0-9a-f]{40,})",
        r"(?P<secret>\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b)",
        r"(?P<secret>\bAIza[0-9A-Za-z_-]{30,}|\bya29\.[0-9A-Za-z_-]{20,})",
        r"(?P<secret>\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)",
        r"(?i)\b(?:bearer|basic)\s+(?P<secret>[A-Za-z0-9._~+/-]{12,}=*)",
        r"(?i)\bauthorization['\"]?\s*[:=]\s*['\"]?(?:token|bearer|basic|apikey|digest|key)\s+(?P<secret>[^\s'\",]{4,})",
        # user:password@, where the password may hold @ and, if no @ comes before the first /, also /
        r"\b[a-z][a-z0-9+.-]{0,30}://(?P<secret>[^\s/@:'\"]{0,200}:[^\s/'\"]{1,1000}(?=@)"
        r"|[^\s/@:'\"]{0,200}:(?!\d{2,5}/)[^\s@'\"]{1,1000}(?=@))",
        r"\b(?:https?|ftp|socks\w*|git\+https?)://(?P<secret>(?!git@)[^\s/@:'\"]{1,1000})(?=@)",
        r"\b[a-z][a-z0-9+.-]{0,30}://(?P<secret>[^\s/@:'\"]{12,1000})(?=@)",
        r"(?i)_proxy['\"]?\s*[:=]\s*['\"]?(?!\w+://)(?P<secret>[^\s'\"/]{1,1000})(?=@)",
        r"(?i)[?&](?:[a-z_-]*token|[a-z_-]*key|sig|[a-z-]*signature|x-amz-credential|password)=(?P<secret>[^&\s'\"]+)",
        r"(?i)\b(?:accountkey|sharedaccesskey)=(?P<secret>[^;\s'\"]{8,})",
    )
)
NAME = (
    r"(?<![\w.-])(?P<name>-{0,2}(?=[\w.-]{0,60}(?i:token|key|pass|secret|credential|cookie|pw|auth|dsn|signature|bearer))"
    r"[A-Za-z_][\w.-]{0,80})"
)
LINE = r"(?m)^[+\- ]?[ \t]*(?:-[ \t]+)?"
"""The start of a line, also of one in a unified diff."""
QUOTED = tuple(
    re.compile(p)
    for p in (
        # name = "...", "name": "...", x["name"] = "...", name: str = "...", name == "..."
        NAME.replace(r"(?<![\w.-])", r"(?<![\w-])")
        + r"\\?['\"]?\]?\s*(?::\s*[A-Za-z_][\w.\[\]| ]{0,40}=|[:=!]?=|:|=>)\s*[rbufRBUF]{0,2}"
        r"(?P<q>\\?(?:'{3}|\"{3}|['\"]))(?P<secret>(?:(?!(?P=q))[^\n]){1,400})(?P=q)",
        r"(?:get|getenv|setdefault|setenv|putenv)\(\s*['\"](?P<name>[\w.-]{2,80})['\"],\s*(?P<q>['\"])"
        r"(?P<secret>[^'\"\n]+)(?P=q)",
        r"['\"](?P<name>[A-Za-z][\w-]{1,60}):[ \t]*(?P<secret>[^\s'\"]+)['\"]",  # a header
    )
)
SHELL = (
    re.compile(r"(?m)(?:(?<![\w.-])|(?<=^-))(?P<name>[A-Z][A-Z0-9_]{1,80})=(?P<secret>[^\s'\"=;&|)][^\s'\";&|)]*)"),
    re.compile(LINE + r"(?:export|setx?|ENV|ARG)[ \t]+(?P<name>\w{2,80})[= ](?P<secret>[^\s'\"=][^\s'\";&]*)"),
)
_LINE = LINE + r"(?P<name>[A-Za-z_][\w.-]{1,80})[ \t]*SIGN[ \t]*(?P<secret>[^\s'\"=][^\s'\"]*)[ \t]*(?:#.*)?\r?$"
"""YAML, ini, toml and .env without quotes, also Python: see `_plain`."""
COLON_LINE, EQUALS_LINE = (re.compile(_LINE.replace("SIGN", sign)) for sign in ":=")
ASSIGNED = re.compile(NAME + r"(?:=|:[ \t]*)(?P<secret>[^\s;&'\"=][^\s;&'\"]*)")
FLAG = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]{1,80})[ \t]+(?P<secret>[^\s;&'\"][^\s;&'\"]*)")
"""Only outside source code, where `token=value` is no secret."""

STRONG = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|(?:ACCESS|PRIVATE|SIGNING|ENCRYPTION|ACCOUNT)_KEY"
    r"|(?:HF|HUB|HUGGINGFACE|GITHUB|GITLAB|GH|WANDB|ACCESS|AUTH|BEARER|API|SESSION|REFRESH)_?TOKEN"
)
NO_VALUE = re.compile(r"\$?\{.*\}|\$\w+|\$\(.*|%\(?\w+\)?[sd]?|<.*>|\*+|\.+|(?i:none|null|true|false|empty)")
"""Stands for a value that is elsewhere, or for none."""
CODE = re.compile(
    r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+[,:]?|[\w.]+(?:\[.*[\]\[,]|\(.*[)(,]).*|[\[({\\|].*|.*,|[-+]?[\d._]+(?:e[-+]?\d+)?"
    r"|(?:str|bytes|bool|object|int|float|any)|(?i:u?int|b?float|complex|tensor)\d+(?:_t)?|[A-Z][a-z]+(?:[A-Z][a-z]+)*"
)


def _quoted(name: str, value: str) -> bool:
    """Is name = "value" a secret?"""
    upper = _upper(name)
    if NO_VALUE.fullmatch(value) or (re.fullmatch(r"[A-Z][A-Z0-9_]*|--?[a-z_-]+", value) and secret_name(value)):
        return False
    if STRONG.search(upper):
        return len(value) >= 4
    if not re.fullmatch(r"[A-Za-z0-9_+/=~.!#$%^&*?-]+", value) or not _mixed(value):
        return False
    if upper.endswith(("KEY", "KEYS")):
        return len(value) >= 24 and sum(c.isdigit() for c in value) >= 3 and "." not in value
    return len(value) >= (6 if upper.endswith(("PASS", "PW", "PWD")) else 8)


def _plain(name: str, value: str) -> bool:
    """Is the line `name: value` a secret, and not code?"""
    if "PASS" in _upper(name) and re.fullmatch(r"\d{6,}", value):
        return True
    if NO_VALUE.fullmatch(value) or CODE.fullmatch(value):
        return False
    if _mixed(value):
        return len(value) >= (6 if STRONG.search(_upper(name)) else 12)
    return bool(STRONG.search(_upper(name))) and len(value) >= 8 and not re.fullmatch(r"\w*_\w*", value)


def _plain_equals(name: str, value: str) -> bool:
    """`name = value`: a word without a digit is a variable there."""
    return (_mixed(value) or not value.isidentifier()) and _plain(name, value)


def _shell(name: str, value: str) -> bool:
    return not NO_VALUE.fullmatch(value) and not re.fullmatch(r"\d{1,5}|\$.*|[A-Za-z_]\w*\(.*", value)


def _assigned(name: str, value: str) -> bool:
    upper = _upper(name)
    if NO_VALUE.fullmatch(value) or (CODE.fullmatch(value) and not STRONG.search(upper)):
        return False
    if STRONG.search(upper):
        return True
    if name.startswith("-"):
        return not value.startswith("--")
    return len(value) >= 4 and (upper in ("TOKEN", "PASS", "PW", "PWD") or (_mixed(value) and len(value) >= 6))


def _mixed(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _upper(name: str) -> str:
    return name.strip("-+~").upper().replace("-", "_").replace(".", "_")


Rule = tuple[re.Pattern[str], Callable[[str, str], bool]]
IN_SOURCE: tuple[Rule, ...] = (
    *((pattern, _quoted) for pattern in QUOTED), *((pattern, _shell) for pattern in SHELL), (COLON_LINE, _plain),
    (EQUALS_LINE, _plain_equals),
)  # fmt: skip
ELSEWHERE: tuple[Rule, ...] = (*IN_SOURCE, (ASSIGNED, _assigned), (FLAG, _assigned))


class Masker:
    """Masks with one salt of 16 bytes."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.name = hashlib.sha256(salt).hexdigest()[:6]

    def mask(self, value: str) -> str:
        if MASK.fullmatch(value):
            return value
        digest = hmac.new(self.salt, value.encode(errors="backslashreplace"), hashlib.sha256).hexdigest()
        return f"<masked {self.name}:{digest[:12]}>"

    def text(self, value: str, *, source: bool = False) -> str:
        """Mask what looks like a secret inside a text.  source: it is program text."""
        return _Text(self, value).masked(IN_SOURCE if source else ELSEWHERE)

    def named(self, name: str, value: str) -> str:
        """Mask the whole value if its name says that it is a secret, else what looks like one inside it."""
        if value and secret_name(name):
            return self.mask(value)
        user, at, host = value.rpartition("@")
        if at and "://" not in value and _upper(name).endswith("PROXY"):
            return f"{self.mask(user)}@{host}"
        return self.text(value)

    def arguments(self, argv: list[str]) -> list[str]:
        """A command line: `--key VALUE`, `key=VALUE` and `--key:VALUE`."""
        out: list[str] = []
        for i, argument in enumerate(argv):
            given = re.fullmatch(r"([+~\w.-]+)([=:])(.+)", argument, re.DOTALL)
            before = argv[i - 1] if i else ""
            flag = before.startswith("-") and not re.search(r"[=:\s]", before) and secret_name(before)
            if flag and argument and not argument.startswith("--"):
                out.append(self.mask(argument))
            elif given and (given[2] == "=" or argument.startswith("-")) and secret_name(given[1]):
                out.append(f"{given[1]}{given[2]}{self.mask(given[3])}")
            else:
                out.append(self.text(argument))
        return out

    def tree(self, value: Any, name: str = "", *, by_name: bool = False, secret: bool = False) -> Any:
        """Every string and key of a JSON tree; by_name: also by the keys above it, numbers too.  Texts of programs are
        under the keys `diff`, `text` and `traceback`."""
        secret = secret or (by_name and secret_name(name))
        if isinstance(value, dict):
            return {
                self.text(k) if isinstance(k, str) else k: self.tree(v, str(k), by_name=by_name, secret=secret)
                for k, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.tree(v, name, by_name=by_name, secret=secret) for v in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.mask(str(value)) if secret and not _upper(name).endswith(("TOKENS", "KEYS")) else value
        if not isinstance(value, str):
            return value
        if secret:
            return self.mask(value) if value else value
        if by_name:
            return self.named(name, value)
        return self.text(value, source=name in ("diff", "text", "traceback"))


class _Text:
    """A text while it is masked.  Each mask stands there as a sign and a number, so that none is masked again."""

    def __init__(self, mask: Masker, value: str) -> None:
        self.mask, self.masks = mask, list[str]()
        self.sign = next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in value)
        self.held = re.compile(f"{self.sign}(\\d+){self.sign}")
        self.value = MASK.sub(lambda match: self._hold(match.group()), value)

    def masked(self, rules: tuple[Rule, ...]) -> str:
        for shape in SHAPES:
            self._apply(shape, None)
        for pattern, decide in rules:
            self._apply(pattern, decide)
        return self.held.sub(lambda match: self.masks[int(match[1])], self.value)

    def _hold(self, mask: str) -> str:
        self.masks.append(mask)
        return f"{self.sign}{len(self.masks) - 1}{self.sign}"

    def _apply(self, pattern: re.Pattern[str], decide: Callable[[str, str], bool] | None) -> None:
        out, done, at = [], 0, 0
        while match := pattern.search(self.value, at):
            start, end = match.span("secret")
            if decide is None:
                wanted = not NO_VALUE.fullmatch(match["secret"])
            else:
                wanted = secret_name(match["name"]) and decide(match["name"], match["secret"])
            at = end if wanted or decide is None else match.end("name")
            if wanted:
                out += [self.value[done:start], self._cover(match["secret"])]
                done = end
        if done:
            self.value = "".join(out) + self.value[done:]

    def _cover(self, secret: str) -> str:
        out, at = "", 0
        for held in self.held.finditer(secret):
            out += (self._hold(self.mask.mask(secret[at : held.start()])) if held.start() > at else "") + held.group()
            at = held.end()
        return out + (self._hold(self.mask.mask(secret[at:])) if at < len(secret) else "")


def secret_name(name: str) -> bool:
    """HF_TOKEN, --api-key, AWS_SECRET_ACCESS_KEY; not TOKENIZERS_PARALLELISM, max_new_tokens or PWD."""
    upper = _upper(name)
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
