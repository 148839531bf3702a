"""An OpenAI-compatible endpoint, for gold data and for the judge.

This module handles the endpoint's key, time-outs, retries and the number of simultaneous requests.
"""

import asyncio
import os
import re
from collections import Counter
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import openai


class NoReply(Exception):
    """The endpoint gave no usable reply, in spite of all retries; `str` says why in a few words.

    refused: whether the endpoint refused the request itself, so that no retry can help.
    message: the reason at greater length, in which *** stands in place of the key.
    """

    def __init__(self, reason, message, key, refused=False):
        super().__init__(reason)
        self.message = message.replace(key, "***")[:300]
        self.refused = refused


class Unreadable(ValueError):
    """A reply came but cannot be used; `str` says why in a few words."""


class Halted(OSError):
    """Something that a training run depends on has failed, and not the run itself.

    The run is saved and ends with this message; --resume continues it.
    """


class Endpoint(AbstractAsyncContextManager):
    """A model behind an OpenAI-compatible endpoint, for one event loop.

    The openai client repeats failed requests. It backs off exponentially, or waits as long as the
    header Retry-After says if that is at most two minutes; a longer time is a failure.

    failures: {kind: number of failed requests}. A failed request counts even if its retry succeeds.

    Raises ValueError where a key is needed and missing.
    """

    def __init__(self, model, base_url=None, *, timeout=120.0, max_retries=5):
        self.model = model
        self.max_retries = max_retries
        self.key = get_api_key(base_url)
        self.failures = Counter()

        async def count_request(request):
            self.failures["no reply"] += 1  # count_reply takes it back when the reply comes

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
            # Any other error is accepted, because some endpoints cannot list their models.
            raise_if_key_refused(error)

    async def ask(self, messages, read, **options):
        """Return read(JSON text of the reply) for the chat completion of some messages.

        read: raises ValueError, LookupError, TypeError or AttributeError for a reply that cannot be
            used. The request is then repeated, up to `max_retries` times.
        options: further fields of the request.

        Raises NoReply where no usable reply comes, and ValueError where the key is refused.
        """
        create = self.client.chat.completions.with_raw_response.create
        for retry in range(self.max_retries + 1):
            if retry > 0:
                await asyncio.sleep(min(8.0, 0.5 * 2 ** (retry - 1)))
            try:
                reply = await create(model=self.model, messages=messages, **options)
            except openai.APIError as error:
                raise_if_key_refused(error)
                refusals = openai.BadRequestError | openai.UnprocessableEntityError
                refused = isinstance(error, refusals)
                raise NoReply(explain(error), str(error), self.key, refused) from error
            try:
                return read(reply.text)
            except Unreadable as error:
                reason = str(error)
            except (ValueError, LookupError, TypeError, AttributeError):
                reason = "broken reply"  # cut JSON, JSON without choices, a page of HTML
            self.failures[reason] += 1
        # What stands before "message" is only an id, a date and the like.
        message = reply.text.partition('"message"')[2] or reply.text
        # ascii() lets no control character reach the terminal. The slice drops its opening quote.
        excerpt = ascii(message)[1:200]
        raise NoReply(reason, f"{reason}; the last reply: {excerpt}", self.key)


async def for_each(work, items, concurrency):
    """Await work(item) for every item, in order and with at most `concurrency` at a time."""
    queue = iter(items)  # all workers take their next item from the same iterator

    async def worker():
        for item in queue:
            await work(item)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


def raise_if_key_refused(error):
    """Raise ValueError if an error of the openai client says that the key is refused."""
    if isinstance(error, openai.AuthenticationError):
        raise ValueError("the endpoint refuses the key in OPENAI_API_KEY (HTTP 401)") from None


def explain(error):
    """Return an error of the openai client in a few words."""
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}"
    return "no reply in time" if isinstance(error, openai.APITimeoutError) else "no connection"


def get_api_key(base_url):
    """Return the key in the environment variable OPENAI_API_KEY.

    Raises ValueError without a key, unless the endpoint is on this machine and so needs none.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    host = urlsplit(base_url or "").hostname or ""
    is_local = re.fullmatch(r"localhost|::1|127(\.\d+){3}", host)
    if not key and not is_local:
        raise ValueError("set the environment variable OPENAI_API_KEY to the key of the endpoint")
    return key or "none"


def check_base_url(flag, url):
    """Raise ValueError for a URL that cannot be an endpoint's; the message names the flag."""
    if not url:
        return
    looks_right = re.fullmatch(r"https?://([^/:\s]+|\[.+\])(:\d+)?(/\S*)?", url)
    try:
        has_valid_port = urlsplit(url).port != 0  # a port that is too large is a ValueError
    except ValueError:
        has_valid_port = False
    if not (looks_right and has_valid_port):
        raise ValueError(f"{flag} {url} must look like http://127.0.0.1:8000/v1")
