"""Web server on the loopback interface for downloads: ranges, ETags, cut connections and slow answers."""

import hashlib
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer:
    """Files by their paths. The fields may be changed at any time."""

    def __init__(self):
        self.files = {}
        self.address = ""
        self.cut_after = None
        """Bytes of a body after which the connection is closed; None: never."""
        self.wait_s = 0.0
        self.busy = 0
        """Number of the next requests that are answered by status 503."""
        self.takes_ranges = True
        self.has_etags = True
        self.drip_s = 0.0
        """Wait before every byte of a body."""
        self.lie = None
        """Function of the content, the first and the last asked byte; returns status, Content-Range and body."""
        self.redirects = {}
        """Where a path leads to."""
        self.requests = []
        """Method, path with its query, and Range."""
        self.headers = []


@contextmanager
def serving(handler):
    """Answer the requests to a free port of the loopback interface in a thread; yield the address."""
    listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@contextmanager
def running_web_server():
    server = WebServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, with_body):
            span = self.headers.get("Range", "")
            server.requests.append((self.command, self.path, span))
            server.headers.append(dict(self.headers))
            time.sleep(server.wait_s)
            if location := server.redirects.get(self.path):
                self.send_response(302)
                self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = server.files.get(self.path.partition("?")[0])
            if content is None or server.busy:
                self.send_response(503 if server.busy else 404)
                server.busy = max(server.busy - 1, 0)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            part = content
            if span and server.lie:
                first, _, last = span.removeprefix("bytes=").partition("-")
                status, content_range, part = server.lie(content, int(first), int(last))
                self.send_response(status)
                if content_range:
                    self.send_header("Content-Range", content_range)
            elif span and server.takes_ranges:
                first, _, last = span.removeprefix("bytes=").partition("-")
                part = content[int(first) : int(last) + 1 if last else None]
                self.send_response(206)
                self.send_header(
                    "Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
                )
            else:
                self.send_response(200)
            if server.has_etags:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()[:12]}"')
                # The same for all versions, as of files that change within a second.
                self.send_header("Last-Modified", "Thu, 26 Nov 2026 12:00:00 GMT")
            if server.takes_ranges:
                self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if with_body and server.cut_after is not None and len(part) > server.cut_after:
                self.wfile.write(part[: server.cut_after])
                self.close_connection = True
            elif with_body and server.drip_s:
                for byte in part:
                    time.sleep(server.drip_s)
                    self.wfile.write(bytes([byte]))
            elif with_body:
                self.wfile.write(part)

    with serving(Handler) as server.address:
        yield server
        server.drip_s = 0.0  # an answer that nobody waits for ends before the next test
