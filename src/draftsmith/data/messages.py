"""Files of prompts and conversations: JSON lines, JSON lists, Parquet; OpenAI and ShareGPT shapes.  Needs no torch.

A file is read a piece at a time.  What cannot be read is a BadLine that names file and line: `Leniency` counts them
and raises past a limit, so that a broken file is an error and a broken line need not be.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.records import Conversation, Prompt

CHUNK_BYTES = 1 << 19
DEEPEST = 100
"""Levels of a prompt's JSON.  Python's own limit is no rule: torch raises it when it compiles."""
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
PER_MESSAGE = ("reasoning_content", "tool_calls", "tool_call_id", "name")
"""What a message may hold besides role and content; the rest is not shown to a chat template."""


@dataclass(frozen=True)
class Chunk:
    """Some lines of a file, whole.  Read by the worker that tokenizes them."""

    file: str
    first_line: int
    """Number of its first line (of a JSON list or Parquet: of its first entry), from 1."""
    data: bytes
    position: int
    """Where the next chunk begins: bytes for lines, entries for a JSON list or Parquet."""


class BadLine(ValueError):
    """A line that is no prompt or conversation."""


UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What making a prompt or conversation of a JSON object may raise."""


class Leniency:
    """Counts bad lines.  Raises InputError at the first one past `limit`, naming it and the key that would allow it."""

    def __init__(self, limit: int, key: str, count: int = 0, *, quiet: bool = False) -> None:
        self.limit, self.key, self.count, self.quiet = limit, key, count, quiet

    def bad(self, what: str) -> None:
        self.count += 1
        if self.count > self.limit:
            many = f" ({self.count} bad lines, {self.key} is {self.limit})" if self.limit else ""
            raise InputError(f"{what}{many}; {self.key} lets so many be skipped and counted")
        if not self.quiet:
            print(f"skipped: {what}", file=sys.stderr)


def read_chunks(path: Path, what: str, start: int = 0, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Chunks of a file from position `start` on, about `size` bytes each.  Raises InputError if it cannot be read."""
    try:
        if path.suffix == ".parquet":
            yield from _in_chunks(path, _parquet_entries(path), start, size)
        elif path.suffix == ".json":
            yield from _in_chunks(path, _json_entries(path), start, size)
        else:
            yield from _line_chunks(path, start, size)
    except OSError as error:
        raise InputError(f"{what} cannot be read: {path}: {error.strerror or error}") from error


def _line_chunks(path: Path, start: int, size: int) -> Iterator[Chunk]:
    with open(path, "rb") as handle:
        line, left = 1, start
        while left > 0 and (block := handle.read(min(left, 1 << 20))):
            line, left = line + block.count(b"\n"), left - len(block)
        while block := handle.read(size):
            if not block.endswith(b"\n"):
                block += handle.readline()
            yield Chunk(str(path), line, block, handle.tell())
            line += block.count(b"\n")


def _in_chunks(path: Path, entries: Iterator[Any], start: int, size: int) -> Iterator[Chunk]:
    lines: list[bytes] = []
    length = number = 0
    for number, entry in enumerate(entries, 1):
        if number <= start:
            continue
        lines.append(json.dumps(entry, default=str).encode() + b"\n")
        length += len(lines[-1])
        if length >= size:
            yield Chunk(str(path), number - len(lines) + 1, b"".join(lines), number)
            lines, length = [], 0
    if lines:
        yield Chunk(str(path), number - len(lines) + 1, b"".join(lines), number)


def _parquet_entries(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise InputError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from error


def _json_entries(path: Path) -> Iterator[Any]:
    """The entries of a JSON list, of which only one is held at a time."""
    decoder, number = json.JSONDecoder(), 0
    with open(path, encoding="utf-8") as handle:
        try:
            text, at, more = handle.read(1 << 20).lstrip(), 1, True
            if not text.startswith("["):
                raise InputError(f"{path} must hold a JSON list of conversations (or be named .jsonl)")
            while True:
                while at < len(text) and text[at] in " \t\r\n,":
                    at += 1
                if at < len(text) and text[at] == "]":
                    return
                try:
                    value, end = decoder.raw_decode(text, at)
                    if end == len(text) and more:
                        raise json.JSONDecodeError("may go on", text, end)
                except json.JSONDecodeError as error:
                    if not more:
                        raise InputError(f"{path}: entry {number + 1}: not JSON: {error.msg}") from error
                    block = handle.read(max(1 << 20, len(text) - at))  # doubling: an entry of n bytes costs O(n)
                    text, at, more = text[at:] + block, 0, bool(block)
                    continue
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}: entry {number + 1}: not JSON that can be read: {error}") from error
                number, at = number + 1, end
                yield value
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 after entry {number}: {error.reason}") from error


def parse_lines(chunk: Chunk) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
    """(line number, object or what is wrong) of each line that is not blank."""
    for number, line in enumerate(io.BytesIO(chunk.data), chunk.first_line):
        if line.isspace():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
            if not isinstance(value, dict):
                yield number, BadLine(f"{chunk.file}:{number}: not a JSON object")
            else:
                yield number, value
        except UnicodeDecodeError as error:
            yield number, BadLine(f"{chunk.file}:{number}: not UTF-8: {error.reason}")
        except json.JSONDecodeError as error:
            yield number, BadLine(f"{chunk.file}:{number}: not JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:  # an integer of too many digits; nested too deeply
            yield number, BadLine(f"{chunk.file}:{number}: not JSON that can be read: {error}")


def read_jsonl(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line.  Raises InputError naming the file and the line."""
    for chunk in read_chunks(path, what):
        for number, value in parse_lines(chunk):
            if isinstance(value, BadLine):
                raise InputError(str(value))
            yield number, value


# ---- shapes


def normalise(value: dict[str, Any], missing: str = "messages") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages in OpenAI shape, tools) of any of the shapes.  Raises one of UNREADABLE."""
    if "conversations" in value and "messages" not in value:
        messages = [_from_sharegpt(m) for m in _a_list(value["conversations"], "conversations")]
    elif "messages" in value:
        messages = [_tidy(m) for m in _a_list(value["messages"], "messages")]
    elif "prompt" in value:
        messages = [{"role": "user", "content": value["prompt"]}]
    else:
        raise KeyError(missing)
    check_messages(messages)
    if isinstance(value.get("system"), str) and value["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": value["system"]})
    tools = value.get("tools") or []
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise ValueError("tools must be a list of objects")
    return messages, tools


def _a_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a non-empty list")
    return value


def _from_sharegpt(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("value"), str):
        raise ValueError("a ShareGPT message must have `from` and a text `value`")
    if message.get("from") not in SHAREGPT_ROLES:
        raise ValueError(f"unknown role {message.get('from')!r}")
    return {"role": SHAREGPT_ROLES[message["from"]], "content": message["value"]}


def _tidy(message: Any) -> Any:
    """Text parts joined, nothing that is null (Parquet gives every field to every message)."""
    if not isinstance(message, dict):
        return message
    out = {"role": message.get("role"), "content": message.get("content")}
    out |= {k: message[k] for k in PER_MESSAGE if message.get(k)}
    if isinstance(out["content"], list):
        parts = out["content"]
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
            raise ValueError("a message has parts that are not text")
        out["content"] = "".join(p["text"] for p in parts)
    if out["content"] is None and out.get("tool_calls"):
        out["content"] = ""
    return out


def check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a non-empty list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("a message must have a role and a text content")
        if message.get("role") not in ROLES:
            raise ValueError(f"unknown role {message.get('role')!r}")


def parse_conversation(value: dict[str, Any], number: int) -> Conversation:
    """One line of conversations.  Raises BadLine with the reason, without file and line."""
    try:
        messages, tools = normalise(value)
        generated = value.get("generated")
        if generated is not None and not all(
            isinstance(i, int) and 0 <= i < len(messages) and messages[i]["role"] == "assistant" for i in generated
        ):
            raise ValueError(f"generated {generated} must list assistant messages")
        return Conversation(
            id=_id(value, number),
            messages=tuple(messages),
            finish_reason=str(value.get("finish_reason") or "stop"),
            completion_tokens=int(value.get("completion_tokens") or 0),
            category=str(value.get("category") or "all"),
            tools=tuple(tools),
            generated=None if generated is None else tuple(generated),
            flags=tuple(value.get("flags") or ()),
            apart=tuple(value.get("apart") or ()),
            prompt_digest=str(value.get("prompt_digest") or ""),
        )
    except UNREADABLE as error:
        raise BadLine(f"not a conversation: {_reason(error)}") from error


def read_conversations(path: Path) -> list[Conversation]:
    """All of a file, strictly: for files that fit into memory."""
    out = []
    for number, value in read_jsonl(path, "conversations (run `draftsmith generate` first)"):
        try:
            out.append(parse_conversation(value, number))
        except BadLine as error:
            raise InputError(f"{path}:{number}: {error}") from error
    if not out:
        raise InputError(f"{path} is empty: there is nothing to tokenize")
    return out


def parse_prompt(value: dict[str, Any], number: int, multi_turn: str) -> Prompt:
    """One line of prompts.  Raises BadLine with the reason, without file and line."""
    try:
        messages, tools = normalise(value, "prompt")
        while len(messages) > 1 and messages[messages[0]["role"] == "system"]["role"] in ("assistant", "tool"):
            del messages[messages[0]["role"] == "system"]  # an answer to nothing
        if multi_turn == "regenerate":
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()  # a given last answer: the target writes its own
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            role = messages[-1]["role"] if messages else "assistant"
            raise ValueError(f"the last message must be the user's, not {role!r}")
        own = _own_turns(messages) if multi_turn == "regenerate" else []
        return Prompt(
            id=_id(value, number),
            messages=tuple(messages),
            category=str(value.get("category") or "all"),
            tools=tuple(tools),
            regenerate=(*own, len(messages)),
        )
    except UNREADABLE as error:
        raise BadLine(f"not a prompt: {_reason(error)}") from error


def _own_turns(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Assistant turns to write anew: not those that call tools, whose results in the prompt answer the given call."""
    return [
        i
        for i, m in enumerate(messages)
        if m["role"] == "assistant" and not m.get("tool_calls") and messages[i + 1]["role"] != "tool"
    ]


def read_prompts(
    path: Path, limit: int | None = None, *, multi_turn: str = "regenerate", max_bad_lines: int = 0
) -> list[Prompt]:
    """All of a file, for files that fit into memory; as `iter_prompts`."""
    return list(iter_prompts(path, limit, multi_turn=multi_turn, max_bad_lines=max_bad_lines))


def iter_prompts(
    path: Path, limit: int | None = None, *, multi_turn: str = "regenerate", max_bad_lines: int = 0,
    quiet: bool = False, key: str = "generate.prompts",
) -> Iterator[Prompt]:  # fmt: skip
    """Prompts in any shape.  Raises InputError naming file and line of what cannot be read, past `max_bad_lines`, and
    for a file without prompts.  quiet: it was read before, and what was skipped was said then.  key: where the config
    names the file."""
    seen: set[str] = set()
    leniency = Leniency(max_bad_lines, "generate.max_bad_lines", quiet=quiet)
    for chunk in read_chunks(path, f"prompts ({key})"):
        for number, value in parse_lines(chunk):
            try:
                if isinstance(value, BadLine):
                    raise value
                prompt = _checked(parse_prompt(value, number, multi_turn))
                if prompt.id in seen:
                    raise BadLine(f"the id {prompt.id!r} appears twice")
            except BadLine as error:
                said = str(error)
                leniency.bad(said if said.startswith(chunk.file) else f"{path}:{number}: {said}")
                continue
            seen.add(prompt.id)
            yield prompt
            if len(seen) == limit:
                return
    if not seen:
        raise InputError(f"{path} holds no prompts")


def _checked(prompt: Prompt) -> Prompt:
    for message in prompt.messages:
        if message["role"] in ("user", "system") and not message["content"].strip():
            raise BadLine(f"not a prompt: a {message['role']} message is empty")
    if is_deeper([*prompt.messages, *prompt.tools], DEEPEST):
        raise BadLine(f"not a prompt: nested more than {DEEPEST} levels deep")
    if has_lone_surrogate(asdict(prompt)):  # as its answer will be written
        raise BadLine("not a prompt: a lone surrogate, which is no Unicode text")
    return prompt


def is_deeper(values: list[Any], levels: int) -> bool:
    """Whether lists and objects lie within each other more than so many levels deep."""
    for _ in range(levels):
        values = [v for v in values if isinstance(v, dict | list)]
        if not values:
            return False
        values = [inner for v in values for inner in (v.values() if isinstance(v, dict) else v)]
    return any(isinstance(v, dict | list) for v in values)


def has_lone_surrogate(value: Any) -> bool:
    """Whether a JSON value holds half a character somewhere, which cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def conversation_key(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> bytes:
    """16 bytes that name what is said by whom, and the tools: two conversations with one key are duplicates."""
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        rest = {k: v for k, v in message.items() if k != "content"}
        content = str(message.get("content", "")).encode("utf-8", "surrogatepass")
        # lengths first: no two conversations are one string of bytes
        told = message["role"] if len(rest) == 1 and "role" in rest else json.dumps(rest, sort_keys=True)
        digest.update(f"{told} {len(content)}:".encode())
        digest.update(content)
    if tools:
        digest.update(json.dumps(tools, sort_keys=True).encode("ascii"))
    return digest.digest()


def prompt_digest(prompt: Prompt) -> str:
    return conversation_key([*prompt.messages, {"regenerate": prompt.regenerate}], prompt.tools).hex()


def _id(value: dict[str, Any], number: int) -> str:
    given = value.get("id")
    return str(number if given is None else given)


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
