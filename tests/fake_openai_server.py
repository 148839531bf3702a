"""An OpenAI-compatible server on 127.0.0.1 that behaves as a test tells it to.

    with FakeOpenAIServer([status(429), choice("Paris")]) as server:
        replies = list(Endpoint("model", server.base_url).ask(chats))
    assert len(server.requests) == 2

A behaviour is (HTTP status, body). It comes from a callable of the request's JSON, or from a list
in the order of arrival, whose last one is repeated.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def choice(content, finish_reason="stop", **message):
    message = {"role": "assistant", "content": content} | message
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


def rating_reply(grade):
    return choice(json.dumps(dict.fromkeys(("creativity", "coherence", "engagement"), grade)))


def status(code, message="no"):
    return code, {"error": {"message": message, "type": "error", "code": None}}


# Twelve replies that hold no text, though the HTTP status is 200.
NO_TEXT = [
    choice(None, "length", reasoning_content="Let me see"),
    choice("<think>Let me see"),
    choice(None, refusal="I cannot help with that"),
    choice(None, "tool_calls", tool_calls=[{"id": "1", "type": "function"}]),
    choice("Once upon", "content_filter"),
    choice("Once", "error"),
    choice(" \n"),
    choice([{"type": "text", "text": "Once"}]),
    (200, {"choices": []}),
    (200, {"error": {"message": "no provider"}}),
    (200, b"<html>Bad gateway</html>"),
    (200, []),
]


def story_in(request):
    """What stands in the fence of a judge's request."""
    text = request["messages"][-1]["content"]
    return re.search(r"<(text-[0-9a-f]{8})>\n(.*)\n</\1>", text, re.DOTALL)[2]


class FakeOpenAIServer:
    """Serves POST /v1/chat/completions, and keeps the `requests` and the `keys` of all so far."""

    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.requests = []
        self.keys = []
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, body = fake.answer(request, self.headers["Authorization"])
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("retry-after-ms", "1")  # so that the client repeats it at once
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, request, key):
        with self.lock:
            self.requests.append(request)
            self.keys.append(key)
            if callable(self.behaviour):
                return self.behaviour(request)
            return self.behaviour.pop(0) if len(self.behaviour) > 1 else self.behaviour[0]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()
