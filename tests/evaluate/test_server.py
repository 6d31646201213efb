"""`evaluate --server` against a server made here: what vLLM and SGLang answer, and what can go wrong on the way."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_config

from draftsmith.config import Config
from draftsmith.data.store import Store
from draftsmith.drafter.model import DFlashDrafter
from draftsmith.errors import InputError
from draftsmith.evaluate.acceptance import heldout_prompts, plain_answers
from draftsmith.evaluate.server import evaluate_server
from draftsmith.rundir import create
from draftsmith.target.model import drafter_spec
from draftsmith.train import checkpoint

SENT_IN_FULL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class Stub:
    """Answers by path; a value, or a function of the request's JSON; (status, text) is sent as it is."""

    def __init__(self) -> None:
        self.paths: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: dict[str, Any]) -> None:
                stub.asked.append((self.path, body))
                value = stub.paths.get(self.path, (404, "not found"))
                value = value(body) if callable(value) else value
                status, text = value if isinstance(value, tuple) else (200, value)
                data = (text if isinstance(text, str) else json.dumps(text)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.close()


@pytest.fixture
def answers(stored: Config, target: Any) -> dict[tuple[int, ...], list[int]]:
    """What plain decoding of the tiny target says, by prompt."""
    prompts = heldout_prompts(Store(stored.store), 2)
    plain = plain_answers(target, prompts, 12, 0.0, 0)
    return {tuple(p.prompt().tolist()): list(a.tokens) for p, a in zip(prompts, plain, strict=True)}


def save_drafter(config: Config, target: Any, step: int = 1) -> Path:
    """A checkpoint in a new attempt."""
    drafter = DFlashDrafter(drafter_spec(config.drafter, target)).initialize(0)
    run = create(config.runs_dir, config.name, new_attempt=True)
    return checkpoint.save(run, step, 1, drafter, torch.optim.AdamW(drafter.parameters()), {"target_weights": "w"}, 1)


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="tiny"}} 7.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="tiny"}} {now}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="tiny"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="tiny"}} {accepted}
vllm:spec_decode_num_accepted_tokens_created{{engine="0",model_name="tiny"}} {now}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="0"}} {slot0}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="1"}} {slot1}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="2"}} 1e+02
vllm:spec_decode_num_accepted_tokens_per_pos_created{{engine="0",model_name="tiny",position="0"}} {now}
vllm:generation_tokens_total{{engine="0",model_name="tiny"}} 99.0
"""


def play_vllm(stub: Stub, answer: Callable[[tuple[int, ...]], list[int]], *, speculates: bool = True) -> None:
    """Each answer takes 4 rounds of 3 drafts; 5 are accepted, 4 of slot 1 and 1 of slot 2.  Counters do not begin at 0."""
    done = 0

    def complete(body: dict[str, Any]) -> Any:
        nonlocal done
        done += 1
        return {"choices": [{"text": "", "token_ids": answer(tuple(body["prompt"]))}]}

    def metrics(body: dict[str, Any]) -> str:
        if not speculates:
            return 'vllm:generation_tokens_total{engine="0"} 99.0\n'
        return METRICS.format(
            drafts=1e6 + 4 * done, drafted=1e7 + 12 * done, accepted=100.0 + 5 * done, slot0=60.0 + 4 * done,
            slot1=40.0 + done, now=1.7e9 + done,
        )  # fmt: skip

    stub.paths |= {
        "/v1/models": {"data": [{"id": "tiny-served"}]},
        "/version": {"version": "0.33.0"},
        "/metrics": metrics,
        "/v1/completions": complete,
    }


def play_sglang(stub: Stub, answer: Callable[[tuple[int, ...]], list[int]], *meta: dict[str, Any]) -> None:
    """`meta`: what each answer's meta_info says."""
    rest = iter(meta)
    stub.paths |= {
        "/v1/models": {"data": [{"id": "tiny"}]},
        "/get_server_info": {"version": "0.5.23", "speculative_algorithm": "DFLASH"},
        "/generate": lambda body: {"output_ids": answer(tuple(body["input_ids"])), "meta_info": next(rest)},
    }


def test_vllm_counters_become_accepted_length_and_acceptance_by_slot(stored, target, stub, answers, capsys):
    path = save_drafter(stored, target)
    play_vllm(stub, answers.__getitem__)
    result = evaluate_server(stored, stub.url)
    assert result["accepted_length_server"] == 1 + 5 / 4 and result["rounds"] == 8
    assert result["acceptance_by_slot_server"] == [1.0, 0.25, 0.0]
    assert result["server"]["kind"] == "vllm" and result["server"]["version"] == "0.33.0"
    assert result["text_equal"] is True and result["answers_equal"] == 2 and result["answers"] == list(answers.values())
    assert result["rule"] == "greedy" and "rule_note" not in result
    assert result["drafter"] == str(path) and result["accepted_length_ours"] >= 1
    file = path.parent.parent / "evaluation" / "server-vllm-t0.json"
    assert json.loads(file.read_text()) == result and f"written: {file}" in capsys.readouterr().out
    for body, prompt in zip(stub.bodies("/v1/completions"), answers, strict=True):
        assert body == {
            "model": "tiny-served", "prompt": list(prompt), "max_tokens": 12, "temperature": 0.0,
            "return_token_ids": True, **SENT_IN_FULL,
        }  # fmt: skip


def test_another_answer_of_the_server_is_seen(stored, target, stub, answers):
    save_drafter(stored, target)
    first = next(iter(answers))
    play_vllm(stub, lambda prompt: [*answers[prompt][:-1], 7] if prompt == first else answers[prompt])
    result = evaluate_server(stored, stub.url)
    assert result["text_equal"] is False and result["answers_equal"] == 1


def test_a_server_without_a_drafter_has_no_accepted_length(stored, stub, answers, tmp_path, target_folder):
    config = make_config(target_folder, tmp_path, f"evaluate.output={tmp_path / 'results'}")
    play_vllm(stub, answers.__getitem__, speculates=False)
    result = evaluate_server(config, stub.url, reference=False)  # neither a run nor a drafter is there
    assert result["rounds"] is None and result["accepted_length_server"] is None
    assert result["acceptance_by_slot_server"] is None and "accepted_length_ours" not in result
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["server-vllm-t0.json"]
    assert not config.runs_dir.exists()


@pytest.mark.parametrize("generation", ["new", "old"])
def test_sglang_reports_with_each_answer(stored, target, stub, answers, generation):
    save_drafter(stored, target)
    lengths = [len(a) for a in answers.values()]
    meta: list[dict[str, Any]] = [{"spec_verify_ct": 5}, {"spec_verify_ct": 4}]
    if generation == "new":
        meta[0] |= {"spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 15, "spec_accept_length": 2.4}
        meta[1] |= {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 12, "spec_accept_length": 3.0}
    play_sglang(stub, answers.__getitem__, *meta)
    result = evaluate_server(stored, stub.url)
    accepted = 12 if generation == "new" else (lengths[0] - 1 - 5) + (lengths[1] - 1 - 4)
    assert result["accepted_length_server"] == pytest.approx(1 + accepted / 9) and result["rounds"] == 9
    assert result["acceptance_by_slot_server"] is None and result["text_equal"] is True
    assert result["server"]["kind"] == "sglang" and result["server"]["version"] == "0.5.23"
    assert result["server"]["flags"]["speculative_algorithm"] == "DFLASH"
    sent = {"max_new_tokens": 12, "temperature": 0.0, **SENT_IN_FULL}
    assert stub.bodies("/generate") == [{"input_ids": list(p), "sampling_params": sent} for p in answers]


def test_sglang_without_a_drafter(stored, target, stub, answers):
    save_drafter(stored, target)
    play_sglang(stub, answers.__getitem__, {}, {})
    result = evaluate_server(stored, stub.url)
    assert result["rounds"] is None and result["accepted_length_server"] is None and result["text_equal"] is True


def test_at_a_temperature_the_rule_is_ours_and_the_text_is_not_compared(stored, target, stub, answers, target_folder,
                                                                       tmp_path):  # fmt: skip
    path = save_drafter(stored, target)
    play_vllm(stub, answers.__getitem__)
    config = make_config(target_folder, tmp_path, "evaluate.temperature=0.7", "evaluate.rule=reject")
    result = evaluate_server(config, stub.url)
    assert result["rule"] == "reject" and "the server accepts by its own" in result["rule_note"]
    assert "text_equal" not in result and {b["temperature"] for b in stub.bodies("/v1/completions")} == {0.7}
    assert (path.parent.parent / "evaluation" / "server-vllm-t0.7-reject.json").is_file()


def test_a_result_is_never_written_over(stored, target, stub, answers):
    path = save_drafter(stored, target)
    play_vllm(stub, answers.__getitem__)
    evaluate_server(stored, stub.url, reference=False)
    folder = path.parent.parent / "evaluation"
    first = (folder / "server-vllm-t0.json").read_text()
    evaluate_server(stored, stub.url)
    evaluate_server(stored, stub.url, reference=False)
    assert sorted(p.name for p in folder.iterdir()) == [f"server-vllm-t0{n}.json" for n in ("-2", "-3", "")]
    assert (folder / "server-vllm-t0.json").read_text() == first


# ---- what goes wrong


def refused(config: Config, url: str, **settings: Any) -> str:
    """One line, beginning with the option and the address; nothing written."""
    with pytest.raises(InputError) as caught:
        evaluate_server(config, url, **settings)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"--server {url}"), message
    assert not list(config.runs_dir.rglob("server-*"))
    return message


def test_a_server_that_cannot_be_reached(stored, target):
    save_drafter(stored, target)
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        message = refused(stored, f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert "/v1/models is not to be had (ConnectError" in message


def test_an_address_without_a_protocol(stored, target):
    save_drafter(stored, target)
    assert "UnsupportedProtocol" in refused(stored, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"/v1/models": {"data": [{"id": "x"}]}, "/version": None, "/metrics": None}, "neither vLLM nor SGLang"),
        ({"/metrics": "llamacpp:tokens_total 3\n"}, "neither vLLM nor SGLang"),
        ({"/v1/models": (500, "out of\n  luck\n")}, "/v1/models answered 500: out of luck"),
        ({"/v1/completions": (500, "Traceback:\n\n  File\n")}, "/v1/completions answered 500: Traceback: File"),
        ({"/v1/completions": (400, {"error": "too long"})}, '/v1/completions answered 400: {"error": "too long"}'),
        ({"/v1/models": "<html>\n"}, "/v1/models did not answer with a JSON object"),
        ({"/v1/models": [1]}, "/v1/models did not answer with a JSON object"),
        ({"/v1/models": {"data": []}}, "/v1/models names no model"),
        ({"/v1/completions": {"choices": [{"text": "a"}]}}, "it gives no token_ids; vLLM 0.10 or newer is needed"),
        ({"/v1/completions": {"choices": []}}, "it gives no token_ids"),
        ({"/get_server_info": {"version": "sglang"}, "/generate": {"text": "a"}}, "/generate gives no output_ids"),
        ({"/get_server_info": {"version": "sglang"}, "/generate": (500, "x\ny")}, "/generate answered 500: x y"),
    ],
)
def test_a_server_that_answers_something_else(stored, target, stub, answers, changes, message):
    save_drafter(stored, target)
    play_vllm(stub, answers.__getitem__)
    stub.paths |= {k: (404, "not found") if v is None else v for k, v in changes.items()}
    assert message in refused(stored, stub.url)


def test_a_drafter_that_does_not_fit_is_refused_before_the_server_is_asked(stored, stub, answers, target_folder,
                                                                          tmp_path):  # fmt: skip
    play_vllm(stub, answers.__getitem__)
    config = make_config(target_folder, tmp_path, f"evaluate.drafter={tmp_path}", f"evaluate.output={tmp_path}/r")
    with pytest.raises(InputError, match="neither a checkpoint"):
        evaluate_server(config, stub.url)
    assert stub.bodies("/v1/completions") == []


def test_without_a_run_what_is_missing_is_named_before_the_server_is_asked(stored, stub, target_folder, tmp_path):
    with pytest.raises(InputError, match=r"no run in .*or set evaluate\.output$"):
        evaluate_server(stored, stub.url, reference=False)
    with pytest.raises(InputError, match=r"no run in .*or set evaluate\.drafter$"):
        evaluate_server(make_config(target_folder, tmp_path, f"evaluate.output={tmp_path}/r"), stub.url)
    assert stub.asked == []
