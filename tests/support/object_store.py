"""S3 server on the loopback interface (moto's), with latency, failing requests and a log of the requests."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from facetrain.remote.filesystem import open_filesystem

BUCKET = "bucket"
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_REFUSED = "<Error><Code>{}</Code><Message>refused</Message></Error>"


@dataclass
class ObjectStore:
    """A running server. Its fields may be changed at any time."""

    endpoint: str = ""
    latency_s: float = 0.0
    """Wait before every answer."""
    failing: float = 0.0
    """Share of the requests that fail, drawn with a fixed seed: half by status 503, half by a cut connection."""
    full: bool = False
    """Whether every write is refused, with status 507."""
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Access keys whose requests are refused -> status and code of the answer."""
    lie: Callable[[bytes], bytes] | None = None
    """Function of the right answer to a range, which returns the bytes that are sent instead; None: no lie."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of every request, in the order of their arrival."""
    failures: int = 0
    _draws: random.Random = field(default_factory=lambda: random.Random(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def around(self, application):
        """Return a WSGI application that answers as `application` does, but late, or not at all."""

        def answer(environ, start_response):
            writes = environ["REQUEST_METHOD"] in ("PUT", "POST")
            with self._lock:
                request = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE", "")
                self.requests.append(request)
                fails = self._draws.random() < self.failing
                is_cut = self._draws.random() < 0.5
                self.failures += fails
            time.sleep(self.latency_s)
            if writes:
                # A connection that is closed before the body is read would be reset.
                body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                environ["wsgi.input"] = _Body(body)
            key = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
            if key in self.refused:
                status, code = self.refused[key]
                body = _REFUSED.format(code).encode()
                start_response(status, [("Content-Length", str(len(body)))])
                return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
            if self.full and writes:
                start_response("507 Insufficient Storage", [("Content-Length", "0")])
                return [b""]
            if fails and not is_cut:
                start_response("503 Slow Down", [("Content-Length", str(len(_SLOW_DOWN)))])
                return [_SLOW_DOWN]
            if self.lie and environ["REQUEST_METHOD"] == "GET" and environ.get("HTTP_RANGE"):
                return self._lie(application, environ, start_response)
            parts = application(environ, start_response)
            if fails and environ["REQUEST_METHOD"] != "HEAD":
                whole = b"".join(parts)
                return [whole[: len(whole) // 2]]  # less than Content-Length says
            return parts

        return answer

    def _lie(self, application, environ, start_response):
        given = []
        body = self.lie(b"".join(application(environ, lambda *arguments: given.extend(arguments))))
        # Nor a checksum, by which boto would find the lie: objects that older programs have written have none.
        left_out = ("content-length", "x-amz-checksum")
        headers = [(name, value) for name, value in given[1] if not name.lower().startswith(left_out)]
        start_response(given[0], [*headers, ("Content-Length", str(len(body)))])
        return [body]


class _Body:
    def __init__(self, body):
        import io

        self.read = io.BytesIO(body).read
        self.readline = io.BytesIO(body).readline


@contextmanager
def running_object_store(monkeypatch, **settings):
    """Yield an `ObjectStore` with an empty bucket; s3:// addresses lead to it, in started processes as well."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_):
            pass

    store = ObjectStore()
    backend = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, store.around(backend), threaded=True, request_handler=Quiet)
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "AWS_ENDPOINT_URL": store.endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        _reset(store)
        store.requests.clear()
        for name, value in settings.items():
            setattr(store, name, value)
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def upload(folder: Path, key: str = "faces") -> str:
    """Write the files of a folder to the bucket; return their address."""
    store, _ = open_filesystem(f"s3://{BUCKET}")
    for path in folder.iterdir():
        if path.is_file() and path.name[0] != ".":
            store.pipe_file(f"{BUCKET}/{key}/{path.name}", path.read_bytes())
    return f"s3://{BUCKET}/{key}"


def _reset(store):
    """Leave an empty bucket in moto's state, which belongs to the process; forget connections to earlier servers."""
    import urllib.request

    import s3fs

    urllib.request.urlopen(f"{store.endpoint}/moto-api/reset", data=b"").close()
    # A client of S3 would read its descriptions of all operations first, which takes longer than most tests.
    urllib.request.urlopen(urllib.request.Request(f"{store.endpoint}/{BUCKET}", method="PUT")).close()
    s3fs.S3FileSystem.clear_instance_cache()
