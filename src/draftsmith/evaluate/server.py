"""Accepted length of a running vLLM or SGLang server, beside this project's own serving loop on the same prompts.

vLLM counts in /metrics (rounds, drafts, accepted; never cut by max_tokens or a stop token); SGLang answers per request.
The server's version and whatever it says of its flags are recorded with the number.  Sampling is sent in full: a value
left out would be taken from the model's generation_config.json, and change the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from draftsmith.config import Config
from draftsmith.data.store import Document, Store
from draftsmith.errors import InputError
from draftsmith.evaluate.acceptance import drafter_and_folder, evaluation_prompts, measure, plain_answers, unused
from draftsmith.export import load_drafter
from draftsmith.files import make_folder, write_text
from draftsmith.progress import Progress
from draftsmith.target.model import load_target, load_tokenizer

SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""The distribution as it is; both servers have these names."""
COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class Served:
    """What a server answered.  `rounds` and `accepted` are None where it does not speculate."""

    tokens: list[list[int]]
    rounds: int | None
    accepted: int | None
    by_slot: list[float] | None

    @property
    def pooled(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds and self.accepted is not None else None


def evaluate_server(config: Config, url: str, *, reference: bool = True, timeout: float = 600.0) -> dict[str, Any]:
    """Ask the server every held-out prompt at `evaluate.temperature`; compare with ours; write JSON.

    reference: also run this project's loop in-process with the same drafter (it loads the target).
    Raises InputError if the server cannot be reached, is neither vLLM nor SGLang, or refuses a request.
    """
    settings = config.evaluate
    path, folder = drafter_and_folder(config, drafter=reference)
    tokenizer = load_tokenizer(config.target) if settings.heldout else None
    prompts = evaluation_prompts(config, Store(config.store), tokenizer, settings.prompts)
    with httpx.Client(base_url=url.rstrip("/"), timeout=timeout) as client:
        facts = server_facts(client)
        if path is not None:  # a drafter that does not fit is noticed before the server is asked
            target = load_target(config.target, config.device)
            drafter = load_drafter(path, target)
        make_folder(folder)
        ask = ask_vllm if facts["kind"] == "vllm" else ask_sglang
        served = ask(client, facts, prompts, settings.max_new_tokens, settings.temperature)
    result: dict[str, Any] = {
        "server": facts,
        "temperature": settings.temperature,
        "rule": "greedy" if settings.temperature == 0 else settings.rule,
        "prompts": len(prompts),
        "tokens": sum(map(len, served.tokens)),
        "rounds": served.rounds,
        "accepted_length_server": served.pooled,
        "acceptance_by_slot_server": served.by_slot,
    }
    if settings.temperature > 0:
        result["rule_note"] = "the rule of accepted_length_ours; the server accepts by its own, see its flags"
    if path is not None:
        ours = measure(
            "ours", target, drafter, prompts, None, max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature, rule=settings.rule, seed=settings.seed,
        ).result  # fmt: skip
        result |= {"drafter": str(path), "accepted_length_ours": ours["accepted_length"]["pooled"]}
        if settings.temperature == 0:
            plain = plain_answers(target, prompts, settings.max_new_tokens, 0.0, settings.seed)
            equal = [list(p.tokens) == t for p, t in zip(plain, served.tokens, strict=True)]
            result |= {"answers_equal": sum(equal), "text_equal": all(equal)}
    stem = f"server-{facts['kind']}-t{settings.temperature:g}" + (f"-{settings.rule}" if settings.temperature else "")
    file = folder / f"{unused(folder, stem)}.json"
    write_text(file, json.dumps({**result, "answers": served.tokens}, indent=2))
    print(json.dumps(result, indent=2))
    print(f"written: {file}")
    return {**result, "answers": served.tokens}


def server_facts(client: httpx.Client) -> dict[str, Any]:
    """Kind, version, models and flags, as far as the server tells."""
    models = _json(client, "GET", "/v1/models")
    if not models.get("data"):
        raise InputError(f"--server {client.base_url}: /v1/models names no model")
    facts: dict[str, Any] = {"url": str(client.base_url), "models": models["data"]}
    for path in ("/server_info", "/get_server_info"):
        info = _optional(client, path)
        if info is not None and ("sglang" in json.dumps(info).lower() or "speculative_algorithm" in info):
            return {**facts, "kind": "sglang", "version": info.get("version"), "flags": info}
    version = _optional(client, "/version")
    if version is not None and "vllm:" in _metrics_text(client):
        return {**facts, "kind": "vllm", "version": version.get("version"), "flags": _optional(client, "/server_info")}
    raise InputError(f"--server {client.base_url}: it answers, but is neither vLLM nor SGLang")


def ask_vllm(
    client: httpx.Client, facts: dict[str, Any], prompts: Sequence[Document], max_new_tokens: int, temperature: float
) -> Served:
    """Completions by token ids; the counters' difference over all of them (nobody else may be asking)."""
    before = _counters(client)
    tokens = []
    with Progress("asking the server", len(prompts), "prompts") as progress:
        for document in prompts:
            body = {
                "model": facts["models"][0]["id"],
                "prompt": document.prompt().tolist(),
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                **SAMPLING,
                "return_token_ids": True,
            }
            choice = (_json(client, "POST", "/v1/completions", body).get("choices") or [{}])[0]
            if choice.get("token_ids") is None:
                raise InputError(f"--server {client.base_url}: it gives no token_ids; vLLM 0.10 or newer is needed")
            tokens.append(choice["token_ids"])
            progress.advance()
    after = _counters(client)
    spent = {k: after[k] - before.get(k, 0.0) for k in after}
    if not spent.get("rounds"):
        return Served(tokens, None, None, None)
    slots = sorted(int(k.removeprefix("slot_")) for k in spent if k.startswith("slot_"))
    by_slot = [spent[f"slot_{s}"] / spent["rounds"] for s in slots]
    return Served(tokens, int(spent["rounds"]), int(spent["accepted"]), by_slot)


def ask_sglang(
    client: httpx.Client, facts: dict[str, Any], prompts: Sequence[Document], max_new_tokens: int, temperature: float
) -> Served:
    """/generate by token ids; SGLang reports verifications and correct drafts with each answer."""
    tokens, rounds, accepted = [], 0, 0
    with Progress("asking the server", len(prompts), "prompts") as progress:
        for document in prompts:
            body = {
                "input_ids": document.prompt().tolist(),
                "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": temperature, **SAMPLING},
            }
            answer = _json(client, "POST", "/generate", body)
            if not {"output_ids", "meta_info"} <= answer.keys():
                raise InputError(f"--server {client.base_url}: /generate gives no output_ids and meta_info")
            meta = answer["meta_info"]
            tokens.append(answer["output_ids"])
            if "spec_verify_ct" in meta:
                rounds += meta["spec_verify_ct"]
                # older servers do not count correct drafts: what they produced beyond one a round and the prefill's
                accepted += meta.get("spec_num_correct_drafts", len(tokens[-1]) - 1 - meta["spec_verify_ct"])
            progress.advance()
    return Served(tokens, rounds or None, accepted if rounds else None, None)


def _counters(client: httpx.Client) -> dict[str, float]:
    """Speculation counters of vLLM's /metrics, summed over engines; slot_<i> by draft position."""
    out: dict[str, float] = {}
    for line in _metrics_text(client).splitlines():
        match = re.match(r"(vllm:spec_decode\w+_total)\{(.*)\} ([0-9.eE+-]+)$", line)
        if not match:
            continue
        name, labels, value = match.groups()
        for key, metric in COUNTERS.items():
            if name == metric:
                out[key] = out.get(key, 0.0) + float(value)
        position = re.search(r'position="(\d+)"', labels)
        if position:
            key = f"slot_{position[1]}"
            out[key] = out.get(key, 0.0) + float(value)
    return out


def _metrics_text(client: httpx.Client) -> str:
    try:
        response = client.get("/metrics")
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 else ""


def _optional(client: httpx.Client, path: str) -> dict[str, Any] | None:
    """What an endpoint says that not every server has."""
    try:
        response = client.get(path)
        value = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _json(client: httpx.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The answer's JSON object.  Raises InputError, of one line, if there is none."""
    try:
        response = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise InputError(
            f"--server {client.base_url}: {path} is not to be had ({type(error).__name__}: {error})"
        ) from error
    if response.status_code != 200:
        said = " ".join(response.text[:200].split())
        raise InputError(f"--server {client.base_url}: {path} answered {response.status_code}: {said}")
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"--server {client.base_url}: {path} did not answer with a JSON object")
    return value
