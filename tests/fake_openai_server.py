"""An OpenAI-compatible server on 127.0.0.1 that behaves as a test tells it to.

    with FakeOpenAIServer([status(429), ok("Paris")]) as server:
        OpenAI(base_url=server.base_url, api_key="none").chat.completions.create(...)
    assert len(server.requests) == 2

The behaviour for each request comes from a callable of its JSON body, or from a list in the order
of arrival, whose last one is repeated. A behaviour is a function of the request handler.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def ok(text, *, finish_reason="stop"):
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    return body(completion([{"index": 0, "message": message, "finish_reason": finish_reason}]))


def rating_reply(grades):
    """A judge's reply in the JSON that was asked for. grades: {criterion: grade}."""
    return ok(json.dumps(grades))


def story_in(request):
    """What stands in the fence of a judge's request."""
    text = request["messages"][-1]["content"]
    return re.search(r"<(text-[0-9a-f]{8})>\n(.*)\n</\1>", text, re.DOTALL)[2]


def completion(choices):
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": choices,
    }


def body(value, code=200, content_type="application/json", cut=0):
    """A reply of any JSON value or bytes. cut: how many bytes to leave out at its end."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    data = data[: len(data) - cut]

    def behave(handler):
        handler.send_response(code)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return behave


def status(code, message="no"):
    """An error as OpenAI words it."""
    return body({"error": {"message": message, "type": "error", "code": None}}, code)


def empty_choices():
    return body(completion([]))


def cut_json(text="Paris"):
    """A reply that ends in the middle of its JSON, under a Content-Length that fits."""
    return body(
        completion([{"index": 0, "message": {"role": "assistant", "content": text}}]), cut=20
    )


def web_page():
    return body(b"<html>Bad gateway</html>", content_type="text/html")


def hang(handler):
    """No reply, until the client leaves or the server closes."""
    handler.server.closing.wait()
    handler.close_connection = True


def drop(handler):
    """Half of the headers, then a closed connection."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
    handler.close_connection = True


class FakeOpenAIServer:
    """Serves POST /v1/chat/completions by the behaviour, and GET /v1/models.

    behaviour: a callable (request body: dict) -> behaviour, called in a thread of its own for each
        request, or a list of behaviours.
    models: the behaviour for GET /v1/models.
    requests: the chat requests so far, as {"body", "headers"}, the names of the headers in lower
        case.
    """

    def __init__(self, behaviour, models=None):
        self.behaviour = behaviour
        self.models = models or body({"object": "list", "data": []})
        self.requests = []
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                behave = fake.models if self.path == "/v1/models" else status(404)
                behave(self)

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/chat/completions":
                    behave = fake.next_behaviour(request, self.headers)
                else:
                    behave = status(404)
                behave(self)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128
            closing = threading.Event()

            def handle_error(self, request, client_address):
                pass  # some clients leave in the middle of a request

        self.server = Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def next_behaviour(self, request, headers):
        with self.lock:
            lower_headers = {name.lower(): value for name, value in headers.items()}
            self.requests.append({"body": request, "headers": lower_headers})
            if not callable(self.behaviour):
                return self.behaviour.pop(0) if len(self.behaviour) > 1 else self.behaviour[0]
        return self.behaviour(request)

    def __enter__(self):
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *exception):
        self.server.closing.set()
        self.server.shutdown()
        self.server.server_close()
