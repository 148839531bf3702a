"""An OpenAI-compatible endpoint: its key, time-outs, retries and bounded concurrency, for gold data and the judge."""

import asyncio
import os
import re
from collections import Counter
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import openai


class NoReply(Exception):
    """The endpoint gave no usable reply, whatever the retries; says why in a few words, its cause in more."""

    def __init__(self, reason, cause=None, key=""):
        super().__init__(reason)
        # the request itself, not its time
        self.refused = isinstance(cause, openai.BadRequestError | openai.UnprocessableEntityError)
        self.message = str(cause or reason).replace(key or "\0", "***")[:300]


class Unreadable(ValueError):
    """A reply came and cannot be used; says why in a few words."""


class Halted(OSError):
    """What the run depends on has failed, not the run: it is saved and ends with this message; --resume continues."""


class Endpoint(AbstractAsyncContextManager):
    """A model behind an OpenAI-compatible endpoint, for one event loop. Raises ValueError where a key is missing.

    The client backs off exponentially and waits as long as Retry-After says (up to two minutes; longer is a failure).

    failures: how many single requests failed, by kind, those included that a retry made good.
    """

    def __init__(self, model, base_url=None, *, timeout=120.0, max_retries=5):
        self.model, self.max_retries, self.key = model, max_retries, get_api_key(base_url)
        self.failures = Counter()

        async def count_request(request):
            self.failures["no reply"] += 1  # until it comes

        async def count_reply(response):
            self.failures["no reply"] -= 1
            if response.status_code >= 400:
                self.failures[f"HTTP {response.status_code}"] += 1

        client = openai.DefaultAsyncHttpxClient(
            event_hooks={"request": [count_request], "response": [count_reply]}
        )
        self.client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=self.key,
            timeout=timeout,
            max_retries=max_retries,
            http_client=client,
        )

    async def __aexit__(self, *exception):
        await self.client.close()

    async def check(self):
        """Raise OSError where nobody answers, ValueError where the key is refused."""
        try:
            await self.client.with_options(max_retries=1).models.with_raw_response.list()
        except openai.APIConnectionError as error:
            raise OSError(
                f"cannot reach {self.client.base_url}; is the server running? ({explain(error)})"
            ) from error
        except openai.APIError as error:
            explain(
                error
            )  # an answer that refuses no key will do: somebody is there, if without a list of models

    async def ask(self, messages, read, **options):
        """read(the reply's text) of one chat completion.

        A reply that `read` raises for is asked for again, as failed requests are by the client. Raises NoReply.
        """
        create = self.client.chat.completions.with_raw_response.create
        for retry in range(self.max_retries + 1):
            await asyncio.sleep(min(8.0, 0.5 * 2 ** (retry - 1)) if retry else 0)
            try:
                reply = await create(model=self.model, messages=messages, **options)
            except openai.APIError as error:
                raise NoReply(explain(error), error, self.key) from error
            try:
                return read(reply.text)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                # cut JSON, no choices, a page of HTML
                reason = str(error) if isinstance(error, Unreadable) else "broken reply"
                self.failures[reason] += 1
        said = ascii(reply.text.partition('"message"')[2] or reply.text)[
            1:200
        ]  # no escapes for the terminal
        raise NoReply(reason, f"{reason}; the last reply: {said}", self.key)


async def for_each(work, items, concurrency):
    """Await work(item) for each item, at most so many at a time, in their order."""
    waiting = iter(items)

    async def worker():
        for item in waiting:
            await work(item)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


def explain(error):
    """An error of the openai client in a few words. Raises ValueError where it is a refused key."""
    if isinstance(error, openai.AuthenticationError):
        raise ValueError("the endpoint refuses the key in OPENAI_API_KEY (HTTP 401)") from None
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}"
    return "no reply in time" if isinstance(error, openai.APITimeoutError) else "no connection"


def get_api_key(base_url):
    """From the environment variable OPENAI_API_KEY; a server on loopback needs none."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key and not re.fullmatch(
        r"localhost|::1|127(\.\d+){3}", urlsplit(base_url or "").hostname or ""
    ):
        raise ValueError("set the environment variable OPENAI_API_KEY to the key of the endpoint")
    return key or "none"


def check_base_url(flag, url):
    """Raise ValueError for what is not the address of an endpoint."""
    if url and not re.fullmatch(r"https?://([^/:]+|\[.+\])(:\d+)?(/.*)?", url):
        raise ValueError(f"{flag} {url} must look like http://127.0.0.1:8000/v1")
