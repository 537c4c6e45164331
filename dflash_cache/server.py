"""Talk to an OpenAI-compatible server: which models it has, and one answer at a time.

The standard library's HTTP client, one kept-alive connection per thread: any thread may ask.
Proxies of the environment are not used.  The key, if one is needed, is in OPENAI_API_KEY.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import threading
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from dflash_cache.errors import ConfigError, DFlashError
from dflash_cache.pieces import visible

CONNECT_SECONDS = 20.0
BACK_OFF = 1.0  # seconds before the second try, doubled for every further one
LONGEST_BACK_OFF = 120.0
AT_ONCE = 1.0  # seconds in which a connection that was closed while idle says so
BROKEN = (OSError, http.client.HTTPException, UnicodeError)  # the last for names like "a..b"
# These speak of address, key or model, so that no row can do better.
HOPELESS = (401, 403, 404, 405)


class ServerError(DFlashError):
    """The server is not there, refuses us altogether, or fails for too many rows."""


class NoAnswer(Exception):
    """This request has no answer; the reason is what gets counted and shown.

    `lost`: the server did not work, whatever was asked.
    """

    def __init__(self, reason: str, *, lost: bool) -> None:
        super().__init__(reason)
        self.lost = lost


class _Unwell(Exception):
    """The server failed in a way that may pass."""

    def __init__(self, reason: str, *, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer: an assistant message, why it ended, and how many tokens it took."""

    message: dict[str, Any]
    finish_reason: str | None
    tokens: int


class Server:
    """An open server; closing it breaks off what is under way, in whichever thread."""

    def __init__(self, address: str, *, timeout: float, retries: int) -> None:
        self.address = address.rstrip("/")
        self._kind, self._place, self._path = _taken_apart(self.address)
        self._key = _key()
        self._timeout = timeout
        self._retries = retries
        self._own = threading.local()
        self._busy: dict[http.client.HTTPConnection, bool] = {}
        self._closed = threading.Event()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for connection, busy in list(self._busy.items()):
            if busy:
                _wake(connection)
            else:
                connection.close()

    def models(self) -> list[dict[str, Any]]:
        """What the server says of its models; the first thing to ask, for it may not be there."""
        try:
            listed = self._ask("GET", "/models", None)["data"]
            return [{"id": str(model["id"]), "root": model.get("root")} for model in listed]
        except (_Unwell, NoAnswer) as error:
            told = f"no answer from the server ({error}); is it running, and is this its address?"
        except (LookupError, TypeError, AttributeError):
            told = "its list of models is none; does the address end as the server's own, in /v1?"
        raise ServerError(f"--server {self.address}: {told}")

    def answer(self, request: dict[str, Any]) -> Reply:
        """One answer, asked for again after a pause when the server fails."""
        for attempt in range(self._retries + 1):
            try:
                return _read_reply(self._ask("POST", "/chat/completions", request))
            except _Unwell as trouble:
                if attempt == self._retries:
                    raise NoAnswer(str(trouble), lost=True) from None
                # Spread out: all threads met the same trouble at the same time.
                pause = BACK_OFF * 2**attempt * random.uniform(0.75, 1.25)
                pause = pause if trouble.pause is None else trouble.pause
                if self._closed.wait(min(LONGEST_BACK_OFF, pause)):
                    raise NoAnswer("stopped", lost=False) from None
        raise AssertionError(self._retries)

    def _ask(self, method: str, path: str, content: dict[str, Any] | None) -> Any:
        status, headers, body = self._exchange(method, path, content)
        if status == 200:
            if headers.get_content_type() == "text/event-stream":
                raise ServerError(
                    f"--server {self.address}{path}: streams, though asked for whole answers; use "
                    "a server that heeds `stream: false`"
                )
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                raise _Unwell("its reply is no JSON") from None
        told = f"HTTP {status}: {_told(body, key=self._key)}"
        if status in HOPELESS:
            raise ServerError(
                f"--server {self.address}{path}: {told}; the address mostly ends in /v1, the key "
                "is read from OPENAI_API_KEY, and --model has to be a name that it serves"
            )
        if status in (408, 429) or status >= 500:
            raise _Unwell(told, pause=_pause(headers.get("Retry-After")))
        raise NoAnswer(told, lost=False)

    def _exchange(
        self, method: str, path: str, content: dict[str, Any] | None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """One request over this thread's connection, which is made anew if it has gone stale."""
        body = None if content is None else json.dumps(content).encode()
        while True:
            connection, used = self._connection()
            asked = time.monotonic()
            try:
                connection.request(method, self._path + path, body, _headers(self._key))
                response = connection.getresponse()
                found = response.status, response.headers, _read(response, self._timeout)
                if response.will_close:
                    self._drop(connection)
                else:
                    self._busy[connection] = False
                    # Looked at after that line, as in `_connection`: it is closed there or here.
                    if self._closed.is_set():
                        self._drop(connection)
                return found
            except TimeoutError:
                self._drop(connection)
                raise NoAnswer(f"no answer in {self._timeout:g} s", lost=True) from None
            except BROKEN as error:
                self._drop(connection)
                # Closed while idle?  Later than at once, the server has had the request, and may
                # have worked on it: to ask again is what `retries` counts.
                stale = used and time.monotonic() - asked < AT_ONCE
                if not (stale and isinstance(error, ConnectionError)):
                    raise _Unwell(_spoken(error)) from None

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """This thread's connection, and whether it has served before."""
        kept = getattr(self._own, "connection", None)
        connection = self._own.connection = kept or self._connected()
        self._busy[connection] = True
        # Looked at after that line: closing either wakes this connection or is seen here.
        if self._closed.is_set():
            self._drop(connection)
            raise NoAnswer("stopped", lost=False)
        return connection, kept is not None

    def _connected(self) -> http.client.HTTPConnection:
        connection = self._kind(*self._place, timeout=min(CONNECT_SECONDS, self._timeout))
        try:
            connection.connect()
        except BROKEN as error:
            raise _Unwell(_spoken(error)) from None
        connection.sock.settimeout(self._timeout)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        self._own.connection = None
        self._busy.pop(connection, None)
        connection.close()


def _wake(connection: http.client.HTTPConnection) -> None:
    """End the wait of the thread that reads from it, which then closes it."""
    with contextlib.suppress(OSError):  # it is down already
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def _taken_apart(address: str) -> tuple[type[http.client.HTTPConnection], tuple[str, int], str]:
    """Kind of connection, host and port, and path of an address."""
    if "@" in address:  # and do not repeat it: this message goes to logs
        raise ConfigError(
            "--server: want an address without user and password; a key is read from OPENAI_API_KEY"
        )
    kinds = {
        "http": (http.client.HTTPConnection, http.client.HTTP_PORT),
        "https": (http.client.HTTPSConnection, http.client.HTTPS_PORT),
    }
    try:
        parts = urlsplit(address)
        if parts.scheme in kinds and parts.hostname and not (parts.query or parts.fragment):
            kind, port = kinds[parts.scheme]
            # Without a port, http.client takes what stands behind the last colon of an IPv6 host.
            return kind, (parts.hostname, parts.port or port), parts.path
    except ValueError:
        pass  # no port, or a bracket left open
    raise ConfigError(f"--server {address}: want an address as http://localhost:8000/v1")


def _key() -> str:
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # http.client would repeat it in a traceback
        raise ConfigError("OPENAI_API_KEY: holds what no header can, as a line end or an umlaut")
    return key


def _headers(key: str) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
    }


def _spoken(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _read(response: http.client.HTTPResponse, seconds: float) -> bytes:
    """The whole body; servers that write blanks while they think would never time out."""
    deadline = time.monotonic() + seconds
    parts = []
    with response:  # read1 leaves it open at its end, and the connection busy
        while part := response.read1(1 << 20):
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError
    if response.length:  # that are missing, which read1 does not mind
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _told(body: bytes, *, key: str) -> str:
    """The server's own words, in whichever of the usual places they are, but not our key."""
    text = body.decode(errors="replace").replace(key or "\0", "(the key)")
    try:
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            while isinstance(found, dict) and key in found:
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
    except (ValueError, RecursionError):
        pass  # plain text, or a page of a proxy
    return visible(" ".join(text[:1000].split()))[:200] or "no message"


def _pause(retry_after: str | None) -> float | None:
    """Seconds that a server asks to wait: a number, or a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None


def _read_reply(payload: Any) -> Reply:
    try:
        choice = payload["choices"][0]
        found = choice["message"]
        reason = choice.get("finish_reason")
        content, calls = found.get("content"), found.get("tool_calls")
        thoughts = found.get("reasoning_content") or found.get("reasoning")
        tokens = int((payload.get("usage") or {}).get("completion_tokens") or 0)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        raise _Unwell("its reply holds no answer") from None
    if not (isinstance(content, str | None) and isinstance(thoughts, str | None)):
        raise _Unwell("its reply holds no text")
    if not isinstance(calls, list | None):
        raise _Unwell("its tool calls are no list")
    if reason in ("abort", "error"):
        raise _Unwell(f"it broke the answer off ({reason})")
    message: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return Reply(message=message, finish_reason=reason, tokens=tokens)
