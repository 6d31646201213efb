"""OpenAI-compatible servers on 127.0.0.1, written by hand: slow, failing half the time, dying.  Real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["FakeServer", dict[str, Any]], dict[str, Any] | int | None]
"""A request's body to: an answer, a status code, or None for a connection that is cut."""


def say(text: str, finish: str = "stop", **message: Any) -> dict[str, Any]:
    content = {"role": "assistant", "content": text, **message}
    usage = {"completion_tokens": len(text.split()) + 1, "prompt_tokens": 3}
    return {"choices": [{"index": 0, "message": content, "finish_reason": finish}], "usage": usage}


def echo(server: FakeServer, body: dict[str, Any]) -> dict[str, Any]:
    return say("answer to " + body["messages"][-1]["content"])


class FakeServer:
    """asked: how often each last message came; answered: how often it was answered; most: requests at one time."""

    def __init__(self, behave: Behaviour = echo, version: str = "1.0", model: str = "m") -> None:
        self.behave, self.version, self.model = behave, version, model
        self.bodies: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.flying = self.most = 0
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    entry = {"id": owner.model, "object": "model", "created": time.time_ns(), "root": "r"}
                    self.give(200, {"object": "list", "data": [entry]})
                elif self.path == "/version":
                    self.give(200, {"version": owner.version})
                else:
                    self.give(404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                key = body["messages"][-1]["content"]
                with owner.lock:
                    owner.bodies.append(body)
                    owner.asked[key] += 1
                    owner.flying += 1
                    owner.most = max(owner.most, owner.flying)
                try:
                    result = owner.behave(owner, body)
                    if result is None:
                        self.close_connection = True
                        self.connection.close()
                    elif isinstance(result, int):
                        self.give(result, {"error": {"message": f"made to say {result}"}})
                    else:
                        with owner.lock:
                            owner.answered[key] += 1
                        self.give(200, result)
                except OSError:
                    pass
                finally:
                    with owner.lock:
                        owner.flying -= 1

            def give(self, status: int, value: dict[str, Any]) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def die(self) -> None:
        """Refuse connections from now on."""
        threading.Thread(target=self.stop, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def serving(*behaviours: Behaviour, **more: Any) -> Iterator[list[FakeServer]]:
    servers = [FakeServer(b, **more) for b in behaviours]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
