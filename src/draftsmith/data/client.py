"""Asking OpenAI-compatible servers (vLLM, SGLang, llama.cpp): many at a time, patiently, several at once.

Each request goes to the server with the fewest in flight.  What may pass (no connection, a time-out, 429, 5xx) is
tried again after a pause that doubles, elsewhere if there is an elsewhere; what will not pass (another 4xx) is not.
Needs no torch.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from draftsmith.config import GenerateConfig
from draftsmith.data.answers import AnswerFile, Reply, Talk
from draftsmith.data.messages import UNREADABLE
from draftsmith.errors import InputError
from draftsmith.progress import Progress
from draftsmith.records import Prompt

MOST_SECONDS = 60.0
"""The longest pause between two tries."""
PASSES = (408, 409, 425, 429)
"""Of the 4xx, those that may pass."""
VERSIONS = (
    ("/version", ("version",)),  # vLLM
    ("/get_server_info", ("version",)),  # SGLang
    ("/server_info", ("version",)),
    ("/props", ("build_info",)),  # llama.cpp
)
CHANGES = ("created", "permission")
"""What a server's list of models says anew at each start."""


class Refused(Exception):
    """The server will not take this request, however often it is asked."""


class Failed(Exception):
    """This request was tried as often as configured."""


@dataclass
class Server:
    """One base URL and how it fares."""

    url: str
    flying: int = 0
    failures: int = 0
    """In a row."""
    failing_since: float = 0.0
    rests_until: float = 0.0
    gone: bool = False
    why: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def worked(self) -> None:
        self.failures, self.rests_until, self.gone = 0, 0.0, False

    def failed(self, why: str, settings: GenerateConfig, rest: float) -> None:
        now = time.monotonic()
        self.failing_since = now if self.failures == 0 else self.failing_since
        self.failures, self.why = self.failures + 1, why
        self.rests_until = max(self.rests_until, now + rest)
        self.gone = self.failures >= 3 and now - self.failing_since >= settings.server_patience


def base_url(url: str) -> str:
    """Without /v1 and slashes at the end.  Raises InputError for what is no URL."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"generate.servers: {url!r} must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def identify(settings: GenerateConfig) -> dict[str, Any]:
    """Who answers: model asked for, what /v1/models says of it, versions.  Raises InputError if a server does not
    answer or does not have the model."""
    found: list[dict[str, Any]] = []
    model = settings.server_model
    with httpx.Client(headers=_headers(settings), timeout=httpx.Timeout(30.0), trust_env=False) as client:
        for url in map(base_url, settings.servers):
            try:
                answer = client.get(f"{url}/v1/models")
                answer.raise_for_status()
                models = [{k: v for k, v in m.items() if k not in CHANGES} for m in answer.json()["data"]]
                names = [str(m["id"]) for m in models]
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"generate.servers: {url}/v1/models does not answer as it should: {error}") from error
            model = model or (names[0] if names else None)
            if model not in names:
                raise InputError(f"generate.server_model {model!r} is not served by {url}, which has {names}")
            entry = {"models": [m for m in models if m["id"] == model], "version": _version(client, url)}
            if entry not in found:
                found.append(entry)
    return {"model": model, "servers": sorted(found, key=repr)}


def _version(client: httpx.Client, url: str) -> str | None:
    for path, keys in VERSIONS:
        try:
            answer = client.get(url + path)
            value = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            continue
        for key in keys:
            if isinstance(value, dict) and isinstance(value.get(key), str):
                return value[key]
    return None


def _headers(settings: GenerateConfig) -> dict[str, str]:
    if settings.api_key_file is None:
        return {}
    try:
        lines = settings.api_key_file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"generate.api_key_file {settings.api_key_file} cannot be read: {error}") from error
    return {"Authorization": f"Bearer {lines[0]}"} if lines else {}


def answer_all(settings: GenerateConfig, model: str, prompts: Iterator[Prompt], count: int, out: AnswerFile) -> None:
    """Answer `count` prompts, appending each conversation to `out` when it is complete.  `prompts` is read as they are
    asked, never ahead.

    Raises InputError when no server is left; what was answered is in the file.
    """
    asyncio.run(_Crowd(settings, model, out).answer(prompts, count))


class _Crowd:
    """Some tasks that each hold one conversation at a time."""

    def __init__(self, settings: GenerateConfig, model: str, out: AnswerFile) -> None:
        self.settings, self.model, self.out = settings, model, out
        self.servers = [Server(base_url(url)) for url in settings.servers]
        self.random = random.Random()

    async def answer(self, prompts: Iterator[Prompt], count: int) -> None:
        many = min(self.settings.concurrency * len(self.servers), count)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=many)
        timeout = httpx.Timeout(self.settings.request_timeout, connect=min(10.0, self.settings.request_timeout))
        headers = _headers(self.settings)
        with Progress("generating", count, "answers") as progress:
            async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=headers, trust_env=False) as client:
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(many):
                            group.create_task(self._hold(client, prompts, progress))
                except* InputError as errors:
                    raise errors.exceptions[0] from None
        for server in self.servers:
            if server.counts["failures"]:
                print(f"{server.url}: {dict(server.counts)}; last: {server.why}", flush=True)

    async def _hold(self, client: httpx.AsyncClient, waiting: Iterator[Prompt], progress: Progress) -> None:
        for prompt in waiting:
            talk = Talk(prompt, self.settings.reasoning)
            try:
                while not talk.done:
                    talk.take(await self._ask(client, talk))
                self.out.write(talk)
            except Refused as error:
                self.out.refused(prompt, str(error))
            except Failed:
                self.out.counts["failed"] += 1
            progress.advance(1, f"{self.out.counts['completion_tokens']} tokens")

    async def _ask(self, client: httpx.AsyncClient, talk: Talk) -> Reply:
        content = json.dumps(self.body(talk), ensure_ascii=False).encode()
        kind = {"content-type": "application/json"}
        for attempt in range(self.settings.attempts):
            server = await self._pick()
            server.flying += 1
            pause = self._pause(attempt)
            try:
                async with asyncio.timeout(self.settings.request_timeout):
                    response = await client.post(f"{server.url}/v1/chat/completions", content=content, headers=kind)
                if response.status_code == 200:
                    reply = parse_reply(response.json(), self.settings.max_new_tokens)
                    server.worked()
                    server.counts["answers"] += 1
                    return reply
                why = f"status {response.status_code}: {response.text[:200]}"
                if response.status_code in (401, 403, 404):
                    raise InputError(f"generate.servers: {server.url}/v1/chat/completions: {why}")
                if response.status_code < 500 and response.status_code not in PASSES:
                    raise Refused(why)
                pause = max(pause, _retry_after(response))
                rest = pause if response.status_code in (429, 503) else 0.0
            except (httpx.TransportError, TimeoutError) as error:
                why = f"{type(error).__name__} {error}".strip()
                rest = 0.0 if isinstance(error, (TimeoutError, httpx.ReadTimeout)) else pause
            except InputError:
                raise
            except (*UNREADABLE, IndexError, AttributeError) as error:
                why, rest = f"an answer that is none: {error!r}", 0.0
            finally:
                server.flying -= 1
            server.failed(why, self.settings, rest)
            server.counts["failures"] += 1
            self.out.counts["retries"] += 1
            if attempt + 1 < self.settings.attempts:
                await asyncio.sleep(pause)
        raise Failed

    async def _pick(self) -> Server:
        """The server with the fewest requests in flight, of those that are not resting or full."""
        while True:
            now = time.monotonic()
            left = [s for s in self.servers if not s.gone]
            if not left:
                raise InputError(
                    f"no server answers any more ({'; '.join(f'{s.url}: {s.why}' for s in self.servers)}): start them, "
                    f"then run the same command again; every answer up to here is kept"
                )
            ready = [s for s in left if s.rests_until <= now and s.flying < self.settings.concurrency]
            if ready:
                return min(ready, key=lambda s: (s.flying, self.random.random()))
            await asyncio.sleep(0.02)

    def _pause(self, attempt: int) -> float:
        """Twice as long each time, and not at the same moment for everybody."""
        return min(self.settings.retry_seconds * 2**attempt, MOST_SECONDS) * self.random.uniform(0.5, 1.5)

    def body(self, talk: Talk) -> dict[str, Any]:
        """The request.  Whatever a server would otherwise fill in from the model's generation_config is said."""
        settings = self.settings
        seed = zlib.crc32(f"{settings.seed}:{talk.prompt.id}:{len(talk.messages)}".encode()) & 0x7FFFFFFF
        body: dict[str, Any] = {
            "model": self.model, "messages": talk.messages, "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature, "top_p": settings.top_p, "seed": seed, "stream": False,
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip
        if talk.prompt.tools:
            body["tools"] = list(talk.prompt.tools)
        if settings.chat_template_kwargs:
            body["chat_template_kwargs"] = settings.chat_template_kwargs
        return body


def parse_reply(value: dict[str, Any], max_new_tokens: int) -> Reply:
    """A chat completion.  Raises KeyError, TypeError and the like for what is none."""
    choice = value["choices"][0]
    message = choice["message"]
    tokens = int((value.get("usage") or {}).get("completion_tokens") or 0)
    finish = choice.get("finish_reason")
    if finish is None:  # never stored as an end of its own
        finish = "length" if tokens >= max_new_tokens else "unknown"
    text, reasoning = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning") or ""
    if not (isinstance(text, str) and isinstance(reasoning, str)):
        raise TypeError("content and reasoning must be texts")
    return Reply(
        text=text,
        finish_reason=str(finish),
        tokens=tokens,
        reasoning=reasoning,
        refused=bool(message.get("refusal")),
        tool_calls=tuple(message.get("tool_calls") or ()),
    )


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(max(float(response.headers.get("retry-after", 0)), 0.0), MOST_SECONDS)
    except ValueError:
        return 0.0
