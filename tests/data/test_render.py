"""Spans by one rendering equal spans by rendering every prefix, for every kind of template; or neither gives any."""

from __future__ import annotations

import pickle
import random
import time

import pytest
from conftest import TEMPLATE
from jinja2 import TemplateError

from draftsmith.config import TargetConfig
from draftsmith.data.render import ChatTemplate, RewritesHistory, strings_looked_for
from draftsmith.errors import InputError
from draftsmith.target.model import load_tokenizer

LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1, found=false) %}{%- for m in messages[::-1] %}{%- set i = messages|length - 1 - "
    "loop.index0 %}{%- if not ns.found and m.role == 'user' and not m.content.startswith('<tool') %}"
    "{%- set ns.last = i %}{%- set ns.found = true %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set why = '' %}{%- if m.reasoning_content is string %}"
    "{%- set why = m.reasoning_content %}{%- elif '</think>' in content %}"
    "{%- set why = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last %}{{- '<|im_start|>assistant\n<think>\n' + why + '\n</think>\n\n' + content }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and "
    "enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
"""History loses its reasoning; the last turn always shows some."""
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + "
    "' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
MARKED = TEMPLATE.replace("+ m['content'] +", "}}{% generation %}{{ m['content'] }}{% endgeneration %}{{")
SECRET = TEMPLATE.replace("{% for", "{% set word = 'magic' %}{% for", 1).replace(
    "{% if add_gen",
    "{% if messages | length > 2 and word in messages[0]['content'] %}{{ 'M' }}{% endif %}{% if add_gen",
)
"""Shows a prefix otherwise than the whole if a content has a certain word."""
TEMPLATES = {
    "chatml": TEMPLATE, "llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "marked": MARKED, "secret": SECRET,
}  # fmt: skip
PIECES = [
    "four",
    " é ",
    "\n\n",
    "—",
    "<|im_end|>",
    "</think>",
    "<think>\nwhy\n</think>\n\nso",
    "magic",
    "<tool>",
    "x" * 50,
]


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})


def say(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def conversation(rng: random.Random) -> list[dict]:
    out = [{"role": "system", "content": "s"}] if rng.random() < 0.2 else []
    for _ in range(rng.randint(1, 4)):
        for role in ("user", "assistant"):
            out.append({"role": role, "content": "".join(rng.choices(PIECES, k=rng.randint(1, 3)))})
    if rng.random() < 0.1:
        out[-1]["reasoning_content"] = "because"
    return out


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except (RewritesHistory, TemplateError) as error:
        return type(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_one_rendering_equals_rendering_every_prefix(name):
    rng, chat = random.Random(0), template(name)
    kinds = set()
    for _ in range(400):
        messages = conversation(rng)
        found = outcome(chat.spans, messages)
        assert found == outcome(chat.spans_by_prefixes, messages)
        kinds.add(found if isinstance(found, type) else "spans")
    assert "spans" in kinds
    assert (RewritesHistory in kinds) == (name in ("qwen3", "secret"))


def test_the_slow_way_is_only_taken_where_it_must_be(monkeypatch):
    chat, slow = template("chatml"), []
    monkeypatch.setattr(chat, "spans_by_prefixes", lambda *a: slow.append(a))
    chat.spans([{"role": "user", "content": "q"}, {"role": "assistant", "content": " a\n"}])
    assert not slow
    chat.spans([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [{}]}])
    assert len(slow) == 1


def test_what_a_template_looks_for_is_found():
    parts, wholes = strings_looked_for(QWEN3)
    assert {"</think>", "<tool"} <= parts and "user" not in parts and {"user", "assistant"} <= wholes
    assert "magic" in strings_looked_for(SECRET)[0]


def test_time_grows_with_the_text_and_not_with_its_square():
    """Twice the turns, about twice the time (rendering every prefix: four times)."""

    def seconds(turns: int) -> float:
        chat, messages = template("chatml"), [{"role": r, "content": "w " * 500} for r in ("user", "assistant")] * turns
        chat.spans(messages)
        best = 1e9
        for _ in range(5):
            begin = time.process_time()
            for _ in range(10):
                chat.spans(messages)
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(160) < 3.2 * seconds(80)


def test_a_turn_alone_with_the_history_as_it_was_seen():
    chat = template("qwen3")
    messages = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "why"},
        {"role": "user", "content": "r"}, {"role": "assistant", "content": "b", "reasoning_content": "so"},
    ]  # fmt: skip
    with pytest.raises(RewritesHistory, match=r"tokenize\.rewritten_history=per_turn"):
        chat.spans(messages)
    for end in (2, 4):
        found = chat.turn(messages[:end])
        ((start, stop),) = found.spans
        assert found.text[:start] == chat.render(messages[: end - 1], generation_prompt=True)
        assert found.text[start:stop].startswith("<think>\n" + messages[end - 1]["reasoning_content"])
    assert "why" not in chat.turn(messages).text


def test_an_empty_thought_that_belongs_to_the_prompt_is_not_the_answer():
    chat = ChatTemplate(QWEN3, QWEN3, {"enable_thinking": False})
    messages = [say("user", "q"), say("assistant", "a"), say("user", "r"), say("assistant", "b")]
    assert [chat.spans(messages[:2]).text[s:e] for s, e in chat.spans(messages[:2]).spans] == ["a<|im_end|>\n"]
    found = chat.turn(messages)
    assert [found.text[s:e] for s, e in found.spans] == ["b<|im_end|>\n"] and "assistant\na<|im_end|>" in found.text


def test_it_is_the_template_that_transformers_runs(target_folder):
    tokenizer = load_tokenizer(TargetConfig(model=str(target_folder)))
    used = ChatTemplate.of(tokenizer)
    used.spans([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    assert used.skeletons and used.compiled
    chat = pickle.loads(pickle.dumps(used))  # noqa: S301 - as a process pool does
    rng = random.Random(1)
    for _ in range(50):
        messages = conversation(rng)
        assert chat.render(messages) == tokenizer.apply_chat_template(messages, tokenize=False)
    tokenizer.apply_chat_template = lambda *a, **k: "something else"
    with pytest.raises(InputError, match="renders otherwise"):
        ChatTemplate.of(tokenizer)


def test_dates_and_variables():
    chat = ChatTemplate("{{ strftime_now('%Y') }}{{ mood }}{{ {'a': '<'} | tojson }}", "", {"mood": "good"})
    assert chat.render([], now="then") == 'thengood{"a": "<"}'
    assert len(chat.render([])) == len("2025" + 'good{"a": "<"}')


ITEMS = TEMPLATE.replace("m['content'] +", "m['content'] }}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}"
                         "[{{ k }}={{ v }}]{% endfor %}{% endfor %}{{", 1)  # fmt: skip
JSON = TEMPLATE.replace("m['content'] +", "m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{", 1)  # fmt: skip
JOINED = TEMPLATE.replace("m['content'] +", "m['content'] }}{% for c in m.tool_calls or [] %}{{ 'f: ' + c.function.arguments }}{% endfor %}{{", 1)  # fmt: skip


def calling(arguments) -> list[dict]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("template", "shown"),
    [(ITEMS, "[x=1]"), (JSON, '{"x": 1}'), (JOINED, 'f: {"x":1}')],
    ids=["items", "json", "joined"],
)
def test_arguments_of_tool_calls_are_shown_as_the_template_wants_them(template, shown):
    made = ChatTemplate(template, template, {})
    messages = calling('{"x":1}')
    assert made.render(messages) == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{shown}<|im_end|>\n"
    assert messages == calling('{"x":1}')
    (span,) = made.spans(messages).spans
    assert made.render(messages)[slice(*span)].startswith(shown)


@pytest.mark.parametrize("arguments", ["no JSON", "[1]", 5, "[" * 200_000], ids=["text", "list", "number", "deep"])
def test_what_a_template_stumbles_over_is_refused(arguments):
    with pytest.raises(TemplateError, match="TypeError"):
        ChatTemplate(ITEMS, ITEMS, {}).spans(calling(arguments))


def test_tools_too_deep_to_be_shown_are_refused():
    tools: list = []
    for _ in range(2000):
        tools = [tools]
    with pytest.raises(TemplateError, match="RecursionError"):
        ChatTemplate(TEMPLATE, "{{ tools | tojson }}" + TEMPLATE, {}).spans(calling("{}")[:1], tools)
