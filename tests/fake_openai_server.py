"""An OpenAI-compatible server on 127.0.0.1 that behaves as a test tells it to.

    with FakeOpenAIServer([status(429), ok("Paris")]) as server:
        Endpoint("model", server.base_url).ask(chats, receive)
    assert len(server.requests) == 2

A behaviour is (HTTP status, body). It comes from a callable of the request's JSON, or from a list
in the order of arrival, whose last one is repeated.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def choice(content, finish_reason="stop", **message):
    """A chat completion with one choice."""
    message = {"role": "assistant", "content": content} | message
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


def ok(text):
    return choice(text)


def rating_reply(grade):
    """A judge's reply in the JSON that was asked for, with one grade for each criterion."""
    return ok(json.dumps(dict.fromkeys(("creativity", "coherence", "engagement"), grade)))


def status(code, message="no"):
    """An error as OpenAI words it."""
    return code, {"error": {"message": message, "type": "error", "code": None}}


# Replies that hold no text, though the HTTP status is 200.
NO_TEXT = {
    "reasoning only": choice(None, "length", reasoning_content="Let me see"),
    "thoughts": choice("<think>Let me see"),
    "refusal": choice(None, refusal="I cannot help with that"),
    "tool call": choice(None, "tool_calls", tool_calls=[{"id": "1", "type": "function"}]),
    "filter": choice("Once upon", "content_filter"),
    "error in a choice": choice("Once", "error"),
    "white space": choice(" \n"),
    "parts": choice([{"type": "text", "text": "Once"}]),
    "no choice": (200, {"choices": []}),
    "error": (200, {"error": {"message": "no provider"}}),
    "web page": (200, b"<html>Bad gateway</html>"),
    "cut": (200, b'{"choices": [{"message": {"content": "Par'),
    "list": (200, []),
}


def story_in(request):
    """What stands in the fence of a judge's request."""
    text = request["messages"][-1]["content"]
    return re.search(r"<(text-[0-9a-f]{8})>\n(.*)\n</\1>", text, re.DOTALL)[2]


class FakeOpenAIServer:
    """Serves POST /v1/chat/completions; `requests` are the JSON and the key of those so far."""

    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.requests = []
        self.keys = []
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, body = fake.answer(request, self.headers["Authorization"])
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, request, key):
        with self.lock:
            self.requests.append(request)
            self.keys.append(key)
            if callable(self.behaviour):
                return self.behaviour(request)
            return self.behaviour.pop(0) if len(self.behaviour) > 1 else self.behaviour[0]

    def __enter__(self):
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()
