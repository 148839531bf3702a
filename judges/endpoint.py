"""A model behind an OpenAI-compatible endpoint, for the judge and for gold data."""

import asyncio
import os
import re
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import openai
from pydantic import BaseModel, Field, ValidationError

# Seconds without a sign of life from the endpoint, after which a request is repeated.
TIMEOUT = 60.0
# How many times the openai client repeats a failed request. It waits longer each time, or as long
# as the header Retry-After says.
MAX_RETRIES = 5
KEY_IS_REFUSED = "the endpoint refuses the key in OPENAI_API_KEY (HTTP 401)"


class NoReply(Exception):
    """The endpoint gave no usable reply. `str` says why in one line, which never holds the key."""


class Refused(NoReply):
    """The endpoint refused the request itself, so that no retry can help."""


# What is needed of a chat completion. An endpoint may leave out everything else.


class Message(BaseModel):
    content: str | None = None


class Choice(BaseModel):
    message: Message
    finish_reason: str | None = None


class Completion(BaseModel):
    choices: list[Choice] = Field(min_length=1)


class Endpoint(AbstractAsyncContextManager):
    """A model behind an OpenAI-compatible endpoint, within one event loop.

    Raises ValueError where a key is needed and missing, and OSError where the environment names a
    proxy or a certificate file that cannot be used.
    """

    def __init__(self, model, base_url=None, timeout=TIMEOUT):
        self.model = model
        self.key = get_api_key(base_url)
        try:
            # A proxy of the environment does not lead to this machine.
            http_client = openai.DefaultAsyncHttpxClient(trust_env=not is_local(base_url))
        except (ImportError, ValueError, OSError):
            # The error's own text may hold the password of a proxy.
            raise OSError(
                "the openai client cannot use the proxy or the certificate file that the"
                " environment names: correct or unset ALL_PROXY, HTTP_PROXY, HTTPS_PROXY,"
                " SSL_CERT_FILE"
            ) from None
        self.client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=self.key or "none",
            timeout=timeout,
            max_retries=MAX_RETRIES,
            http_client=http_client,
        )

    async def __aexit__(self, *exception):
        await self.client.close()

    async def check(self) -> None:
        """Raise OSError where nobody answers, or the key is refused."""
        try:
            await self.client.with_options(max_retries=1).models.with_raw_response.list()
        except openai.AuthenticationError:
            raise OSError(KEY_IS_REFUSED) from None
        except openai.APIConnectionError as error:
            raise OSError(
                f"cannot reach {self.client.base_url} ({explain(error)}): is the address right, is"
                " the server running, and can a proxy of the environment reach it?"
            ) from None
        except openai.APIError:
            pass  # some endpoints cannot list their models

    async def ask(self, messages: list[dict], **options) -> tuple[str, bool]:
        """Return the text of the reply to some messages, and whether the model has finished it.

        options: further fields of the request.

        Raises NoReply where no reply comes that can be read, and OSError where the key is refused.
        """
        create = self.client.chat.completions.with_raw_response.create
        try:
            reply = await create(model=self.model, messages=messages, **options)
        except openai.AuthenticationError:
            raise OSError(KEY_IS_REFUSED) from None
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise Refused(f"{explain(error)}: {self.excerpt(error.message)}") from None
        except openai.APIStatusError as error:
            raise NoReply(f"{explain(error)}: {self.excerpt(error.message)}") from None
        except openai.APIError as error:
            raise NoReply(explain(error)) from None
        try:
            completion = Completion.model_validate_json(reply.text)
        except ValidationError:  # cut JSON, JSON without choices, a page of HTML
            raise NoReply(f"broken reply: {self.excerpt(reply.text)}") from None
        choice = completion.choices[0]
        return choice.message.content or "", choice.finish_reason != "length"

    def excerpt(self, text: str) -> str:
        """Return the beginning of a text for a message, without the key and control characters."""
        if self.key:
            text = text.replace(self.key, "***")
        return ascii(text[:200])


async def for_each(work, items, concurrency) -> None:
    """Await work(item) for every item, in order and with at most `concurrency` at a time."""
    queue = iter(items)  # all workers take their next item from the same iterator

    async def worker():
        for item in queue:
            await work(item)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


def explain(error) -> str:
    """Return an error of the openai client in a few words."""
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}"
    return "no reply in time" if isinstance(error, openai.APITimeoutError) else "no connection"


def is_local(base_url) -> bool:
    """Whether an endpoint is on this machine."""
    host = urlsplit(base_url or "").hostname or ""
    return bool(re.fullmatch(r"localhost|::1|127(\.\d+){3}", host))


def get_api_key(base_url) -> str:
    """Return the key in the environment variable OPENAI_API_KEY.

    It may be empty if the endpoint is on this machine. Raises ValueError for any other endpoint
    without a key, and for a key that no header can hold.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key and not is_local(base_url):
        raise ValueError("set the environment variable OPENAI_API_KEY to the key of the endpoint")
    if not re.fullmatch(r"[!-~]*", key):
        raise ValueError(
            "the environment variable OPENAI_API_KEY holds a character that no key has, such as a"
            " curly quote: set it again"
        )
    return key


def check_base_url(flag, url) -> None:
    """Raise ValueError for a URL that cannot be an endpoint's; the message names the flag."""
    if not url:
        return
    try:
        address = urlsplit(url)
        is_valid = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # the port is no number, or too large
        is_valid = False
    if not is_valid or "@" in url:  # before an @ stands a password, which logs would keep
        raise ValueError(f"{flag} must look like http://127.0.0.1:8000/v1, without a user's name")
