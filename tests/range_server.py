"""A web server for a folder that answers range requests, as object stores do.

`python range_server.py FOLDER` prints its port and serves until it is killed.
"""

import re
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20  # one packet an answer: two would wait for each other

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        payload, whole = path.read_bytes(), True
        size = len(payload)
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(found[1]), int(found[2] or size - 1)
            if begin >= size:
                self.send_error(416)
                return
            payload, whole = payload[begin : end + 1], False
        self.send_response(200 if whole else 206)
        if not whole:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(payload) - 1}/{size}")
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        if body:
            self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=sys.argv[1]))
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
