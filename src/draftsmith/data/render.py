"""Conversations to text: the model's own chat template, and where in the text the target's own answers are.

An answer's span begins where the generation prompt ends and ends where the rendering of the conversation up to that
answer ends.  It is only believed if rendering a prefix gives a prefix of the whole.  Rendering every prefix of every
conversation costs a multiple of rendering it, so that is done once for each sequence of roles, with placeholders for
the contents (`Skeleton`); a conversation is rendered once, and its text must equal the skeleton with the contents
filled in, character for character.  Whatever is not that plain (contents that the template tests for, tool calls,
reasoning, tools) has its own prefixes rendered.  Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, zip_longest
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftsmith.errors import InputError

REWRITES = (
    "the chat template rewrites earlier turns (rendering a prefix does not give a prefix of the whole), so supervised "
    "spans of multi-turn conversations cannot be exact: set tokenize.rewritten_history=per_turn for one document an "
    "answer"
)
PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")
Message = dict[str, Any]
Span = tuple[int, int]


class RewritesHistory(InputError):
    """Rendering a prefix of the conversation does not give a prefix of its rendering."""

    def __init__(self) -> None:
        super().__init__(REWRITES)


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation; `spans` are character ranges, ascending; `answers`: of which message each."""

    text: str
    spans: tuple[Span, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """A sequence of roles, rendered: `glue[i]` precedes content i, the last follows the last content.

    opens: for assistant message i, how far into glue[i] the generation prompt reaches; closes: how far into
    glue[i + 1] the rendering of the conversation up to it reaches.
    """

    glue: tuple[str, ...]
    opens: dict[int, int]
    closes: dict[int, int]


@dataclass
class ChatTemplate:
    """The template as transformers runs it.  Pickled, it is the three texts; each process compiles its own.

    variables: special tokens (bos_token ...) and whatever `generate.chat_template_kwargs` sets.
    """

    source: str
    tool_source: str
    variables: dict[str, Any]
    skeletons: dict[tuple[str, ...], Skeleton | None] = field(default_factory=dict, repr=False)
    compiled: dict[str, Any] = field(default_factory=dict, repr=False)
    tested: tuple[frozenset[str], frozenset[str]] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "source": self.source, "tool_source": self.tool_source, "variables": self.variables,
            "skeletons": {}, "compiled": {}, "tested": None,
        }  # fmt: skip

    @classmethod
    def of(cls, tokenizer: Any, kwargs: dict[str, Any] | None = None) -> ChatTemplate:
        """Of a transformers tokenizer.  Raises InputError if it renders otherwise than transformers does."""
        with_tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        own = cls(
            source=tokenizer.get_chat_template(None, None),
            tool_source=tokenizer.get_chat_template(None, with_tools),
            variables={**tokenizer.special_tokens_map, **(kwargs or {})},
        )
        probe = [{"role": "user", "content": " What?\n<b> "}, {"role": "assistant", "content": "Four — 4. "}]
        for messages, prompt in ((probe, False), (probe[:1], True)):
            theirs = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **(kwargs or {})
            )
            if own.render(messages, generation_prompt=prompt) != theirs:
                raise InputError("target.model: its chat template renders otherwise than transformers does")
        return own

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False,
        now: str | None = None,
    ) -> str:  # fmt: skip
        """The text.  Raises jinja2's TemplateError as `rendered` does.  now: a fixed date, for fingerprints."""
        source = self.tool_source if tools else self.source
        if source not in self.compiled:
            made = environment().from_string(source)
            self.compiled[source] = made, dict(made.globals)
        template, names = self.compiled[source]
        rest = {
            "tools": list(tools) or None, "documents": None, "add_generation_prompt": generation_prompt,
            **self.variables, **({} if now is None else {"strftime_now": lambda form: now}),
        }  # fmt: skip

        def render(shown: list[Message]) -> str:
            # as template.render does, which would copy a chain of dictionaries for every conversation
            context = template.new_context({**names, "messages": shown, **rest}, shared=True)
            return "".join(template.root_render_func(context))

        return rendered(render, messages)

    def spans(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """The whole conversation.  Raises RewritesHistory, or jinja2's TemplateError if the template refuses it."""
        if not tools and all(self.is_plain(m) for m in messages):
            skeleton = self.skeleton(tuple(m["role"] for m in messages))
            if skeleton is not None:
                text = self.render(messages)
                contents = [m["content"] for m in messages]
                for tried in (contents, [c.strip() for c in contents]):
                    if text == "".join(chain.from_iterable(zip_longest(skeleton.glue, tried, fillvalue=""))):
                        return Rendered(text, tuple(_filled(skeleton, tried)), tuple(skeleton.opens))
        return self.spans_by_prefixes(messages, tools)

    def spans_by_prefixes(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """As `spans`, with every prefix of this very conversation rendered: the plain version."""
        text = self.render(messages, tools)
        out, answers = [], []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], tools, generation_prompt=True)
                until = self.render(messages[: i + 1], tools)
                if not (until.startswith(before) and text.startswith(until)):
                    raise RewritesHistory
                out.append((len(before), len(until)))
                answers.append(i)
        return Rendered(text, tuple(out), tuple(answers))

    def turn(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """Only the last answer, with the history as the target saw it.  Raises RewritesHistory if not even that."""
        before, text = self.render(messages[:-1], tools, generation_prompt=True), self.render(messages, tools)
        if not text.startswith(before):
            raise RewritesHistory
        return Rendered(text, ((len(before), len(text)),), (len(messages) - 1,))

    def skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """None if the template does not treat contents as wholes, or shows a prefix otherwise than the whole."""
        if roles not in self.skeletons:
            if len(self.skeletons) >= 4096:
                self.skeletons.clear()
            try:
                self.skeletons[roles] = self._skeleton(roles)
            except jinja2.TemplateError:
                self.skeletons[roles] = None
        return self.skeletons[roles]

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        messages = [{"role": role, "content": f"\ue000{i}\ue001"} for i, role in enumerate(roles)]
        text = self.render(messages)
        found = list(PLACEHOLDER.finditer(text))
        if [int(m[1]) for m in found] != list(range(len(roles))):
            return None
        begins = [0, *(m.end() for m in found)]  # of each piece of glue
        ends = [*(m.start() for m in found), len(text)]
        opens, closes = {}, {}
        for i, role in enumerate(roles):
            if role == "assistant":
                before = self.render(messages[:i], generation_prompt=True)
                until = self.render(messages[: i + 1])
                if not (until.startswith(before) and text.startswith(until)):
                    return None
                opens[i], closes[i] = len(before) - begins[i], len(until) - begins[i + 1]
                if not (0 <= opens[i] <= ends[i] - begins[i] and 0 <= closes[i] <= ends[i + 1] - begins[i + 1]):
                    return None
        return Skeleton(tuple(text[b:e] for b, e in zip(begins, ends, strict=True)), opens, closes)

    def is_plain(self, message: Message) -> bool:
        """Role and a content, in which the template looks for nothing."""
        if self.tested is None:
            plain, with_tools = strings_looked_for(self.source), strings_looked_for(self.tool_source)
            self.tested = plain[0] | with_tools[0], plain[1] | with_tools[1]
        content = message["content"]
        parts, wholes = self.tested
        return (
            len(message) == 2
            and bool(content.strip())
            and content not in wholes
            and "\ue000" not in content
            and not any(p in content for p in parts)
        )


def rendered(render: Callable[[list[Message]], str], messages: Sequence[Message]) -> str:
    """What a template makes of `messages`.  OpenAI gives the arguments of a tool call as JSON text; most templates want
    the object, some the text, so the one is tried after the other.

    Raises jinja2's TemplateError if the template refuses, and for whatever else it stumbles over.
    """
    given = list(messages)
    objects = [_with_objects(m) for m in given]
    for shown in (objects, given) if objects != given else (given,):
        try:
            return render(shown)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            stumbled = error
    raise jinja2.TemplateError(f"{type(stumbled).__name__}: {stumbled}") from stumbled


def _with_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(c) for c in calls]} if isinstance(calls, list) else message


def _with_object(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, LookupError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _filled(skeleton: Skeleton, contents: Sequence[str]) -> Iterator[Span]:
    at = 0
    for i, content in enumerate(contents):
        begin = at + skeleton.opens.get(i, 0)
        at += len(skeleton.glue[i]) + len(content)
        if i in skeleton.opens:
            yield begin, at + skeleton.closes[i]


def strings_looked_for(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """(strings that the template may look for inside a content, strings it compares a whole value with).

    Found in the template's syntax tree: `'x' in ..`, `startswith('x')` and the like; and strings given a name, which
    may be looked for by it.  What is only split off, stripped or replaced changes the text itself, so it is noticed.
    """
    tree = environment().parse(source)
    parts: set[str] = set()
    wholes: set[str] = set()
    for compare in tree.find_all(nodes.Compare):
        for left, operand in zip([compare.expr, *(o.expr for o in compare.ops[:-1])], compare.ops, strict=True):
            if operand.op in ("in", "notin"):
                parts |= _strings(left)
            wholes |= _strings(left) | _strings(operand.expr)
    for test in tree.find_all(nodes.Test):
        if test.name == "in":
            parts |= _strings(test.node)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in LOOKS:
            for argument in call.args:
                parts |= _strings(argument)
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.node, (nodes.Const, nodes.List, nodes.Tuple)):
            parts |= _strings(assign.node)
    return frozenset(parts - {""}), frozenset(wholes)


LOOKS = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "partition", "rpartition")


def _strings(node: nodes.Node) -> set[str]:
    found = {c.value for c in node.find_all(nodes.Const) if isinstance(c.value, str)}
    return found | ({node.value} if isinstance(node, nodes.Const) and isinstance(node.value, str) else set())


class GenerationBlock(Extension):
    """`{% generation %}`: marks answers for transformers; it renders what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> str:
        return caller()


def environment() -> jinja2.Environment:
    """As transformers makes it (utils/chat_template_utils.py), so that a template needs no transformers to be run."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
