"""An OpenAI-compatible server for tests, in a process of its own.

`python chat_server.py scripted` does what the last user message says (see `Script`).
`python chat_server.py FOLDER` answers greedily with the model in a Hugging Face folder.
Both print their port and serve until they are killed.  GET /seen tells what was asked.
"""

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(content, *, finish="stop", tokens=None, **message):
    return {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": finish,
            }
        ],
        "usage": {"completion_tokens": len((content or "").split()) if tokens is None else tokens},
    }


class Script:
    """A user message that is a JSON object says what to do.

    `do`: one action for every time that it is asked, the last one for all further times;
    `say` and `more` (further keys of `completion`); `seconds` to think; `wait_for` others.
    """

    def answer(self, request, *, times, seen):
        text = request["messages"][-1]["content"]
        told = json.loads(text) if isinstance(text, str) and text.startswith("{") else {}
        deadline = time.monotonic() + 10
        while seen.most_at_once < told.get("wait_for", 0) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(told.get("seconds", 0))
        actions = told.get("do", ["ok"])
        action = actions[min(times, len(actions)) - 1]
        return action, completion(told.get("say", f"You said {text}"), **told.get("more", {}))


class Model:
    """A real model, one request at a time."""

    def __init__(self, folder):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.lock = threading.Lock()

    def answer(self, request, *, times, seen):
        inputs = self.tokenizer.apply_chat_template(
            request["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        assert request["temperature"] == 0
        with self.lock:
            ids = self.model.generate(
                **inputs, do_sample=False, max_new_tokens=request["max_tokens"]
            )[0, inputs["input_ids"].shape[1] :]
        ended = int(ids[-1]) == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return "ok", completion(text, finish="stop" if ended else "length", tokens=len(ids))


class Seen:
    """What was asked, how often, and how much of it at once."""

    def __init__(self):
        self.lock = threading.Lock()
        self.forget()

    def forget(self):
        self.asked, self.answered = Counter(), Counter()
        self.requests, self.keys, self.ports = [], [], set()
        self.under_way = self.most_at_once = 0

    def told(self):
        return {
            "asked": self.asked,
            "answered": self.answered,
            "requests": self.requests,
            "keys": self.keys,
            "connections": len(self.ports),
            "most_at_once": self.most_at_once,
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20  # one packet an answer: two would wait for each other

    def do_GET(self):
        if self.path == "/seen":
            with seen.lock:
                self.send(200, seen.told())
        elif self.path == "/forget":
            with seen.lock:
                seen.forget()
            self.send(200, {})
        elif self.path.endswith("/v1/models"):
            names = ["one", "two"] if self.path.startswith("/two") else ["target"]
            self.send(200, {"data": [{"id": name, "root": f"/models/{name}"} for name in names]})
        else:
            self.send(404, {"detail": "Not Found"})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps(request["messages"][-1]["content"])
        with seen.lock:
            seen.asked[text] += 1
            times = seen.asked[text]
            seen.requests.append(request)
            seen.keys.append(self.headers.get("Authorization"))
            seen.ports.add(self.client_address[1])
            seen.under_way += 1
            seen.most_at_once = max(seen.most_at_once, seen.under_way)
        try:
            action, payload = brain.answer(request, times=times, seen=seen)
        finally:
            with seen.lock:
                seen.under_way -= 1
        if action == "ok":
            with seen.lock:
                seen.answered[text] += 1
        self.act(action, payload)

    def act(self, action, payload):
        if action in ("ok", "ok, then hang up"):
            self.send(200, payload)
            self.close_connection = action != "ok"  # which the headers did not announce
        elif action == "hang up":
            self.close_connection = True
        elif action == "half":
            self.send(200, payload, cut=20)
            self.close_connection = True
        elif action == "ok, and close":
            self.send(200, payload, {"Connection": "close"})
        elif action == "drip":
            self.drip()
        elif action == "stream":
            self.send(200, b"data: [DONE]\n\n", {"Content-Type": "text/event-stream"})
        elif action == "echo the key":
            self.send(401, {"detail": f"not for {self.headers['Authorization']}"})
        elif action == "garbage":
            self.send(200, b"<html>no model here")
        elif action == "no choices":
            self.send(200, {"choices": []})
        else:
            status, _, words = action.partition(" ")
            headers = {"Retry-After": "0"} if status in ("429", "503") else {}
            self.send(int(status), {"error": {"message": words or "out of order"}}, headers)

    def send(self, status, payload, headers=None, *, cut=0):
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - cut])

    def drip(self):
        """Blanks for two seconds, as some servers send while they think."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(20):
            self.wfile.write(b"1\r\n \r\n")
            self.wfile.flush()
            time.sleep(0.1)
        self.close_connection = True

    def log_message(self, *_):
        """Nobody reads it."""


class Listener(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Clients are killed on purpose."""


if __name__ == "__main__":
    seen = Seen()
    brain = Script() if sys.argv[1] == "scripted" else Model(sys.argv[1])
    listener = Listener(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{listener.server_address[1]}\n")
    sys.stdout.flush()
    listener.serve_forever()
