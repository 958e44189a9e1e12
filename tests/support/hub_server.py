"""The part of the Hugging Face Hub that huggingface_hub uses here, on the loopback interface."""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.support.web_server import serving


class HubServer:
    """Repositories with one revision each, which is `main` and `refs/pr/1`: {kind/org/repo: {file: content}}, kind is
    models or datasets."""

    def __init__(self):
        self.address = ""
        self.repositories = {}
        self.private = set()
        """Names of the repositories that were created as private ones."""
        self.cards = {}
        """Card data of a repository, such as {"license": "mit"}."""
        self.large = 100
        """Bytes from which a file is in Git LFS."""
        self.requests = []
        self.tokens = []
        self.stored = {}
        """Objects of Git LFS by their SHA-256."""

    def commit(self, name):
        content = repr(sorted(self.repositories[name].items()))
        return hashlib.sha1(content.encode()).hexdigest()

    def entry(self, path, content):
        entry, stored = {"type": "file", "path": path, "size": len(content)}, content
        if len(content) >= self.large:
            checksum = hashlib.sha256(content).hexdigest()
            # Git has only a pointer to the content, whose blob it is.
            stored = b"oid sha256:%s\nsize %d\n" % (checksum.encode(), len(content))
            entry |= {"lfs": {"oid": checksum, "size": len(content), "pointerSize": len(stored)}}
        return entry | {"oid": hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()}


@contextmanager
def running_hub():
    hub = HubServer()
    with serving(type("Handler", (_Handler,), {"hub": hub})) as hub.address:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(b"")

    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.answer(self.body())

    def do_PUT(self):
        content = self.body()
        self.hub.stored[hashlib.sha256(content).hexdigest()] = content
        self.send(b"", ETag='"1"')

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, content, status=200, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def answer(self, body):
        """Answer a request for a file, `[datasets/]ORG/REPO/resolve/REVISION/FILE`, or one below `api`."""
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        self.hub.requests.append((self.command, self.path))
        self.hub.tokens.append(self.headers.get("Authorization", ""))
        if parts[-3:] == ["lfs", "objects", "batch"]:
            self.send_upload_addresses(body)
        elif parts[:2] == ["api", "validate-yaml"]:
            self.send_errors_of(json.loads(body)["content"])
        elif parts == ["api", "repos", "create"]:
            self.create(json.loads(body))
        elif parts[0] == "api":
            self.answer_about("/".join(parts[1:4]), parts[4:], body)
        else:
            end = parts.index("resolve")
            kind = "datasets" if parts[0] == "datasets" else "models"
            self.send_file("/".join([kind, *parts[end - 2 : end]]), "/".join(parts[end + 2 :]))

    def send_errors_of(self, card):
        license = yaml.safe_load(card.split("---")[1])["license"]
        if license in ("mit", "cc-by-nc-4.0", "other"):
            self.send({"errors": [], "warnings": []})
        else:
            message = '"license" must be one of [mit, cc-by-nc-4.0, other]'
            self.send({"errors": [{"message": message}], "warnings": []}, 400)

    def create(self, request):
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        is_new = f"models/{name}" not in self.hub.repositories
        self.hub.repositories.setdefault(f"models/{name}", {})
        if is_new and (request.get("private") or request.get("visibility") == "private"):
            self.hub.private.add(f"models/{name}")
        self.send({"url": f"{self.hub.address}/{name}", "name": name}, 200 if is_new else 409)

    def send_upload_addresses(self, body):
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.address}/put/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        self.send({"transfer": "basic", "objects": objects})

    def files_of(self, name):
        """Return the files of a repository; None, after the answer, if there is no such repository."""
        files = self.hub.repositories.get(name)
        if files is None:
            self.send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        return files

    def send_file(self, name, path):
        files = self.files_of(name)
        if files is None:
            return
        content, commit = files.get(path), self.hub.commit(name)
        if content is None:
            self.send({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return
        span = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = span.partition("-")
        part = content[int(first) : int(last) + 1] if span else content
        self.send(part, 206 if span else 200, ETag=f'"{commit}"', X_Repo_Commit=commit)

    def answer_about(self, name, rest, body):
        files = self.files_of(name)
        if files is None:
            return
        kind = rest[0] if rest else "revision"
        if kind == "revision":
            self.send_repository(name, rest[1:])
        elif kind == "paths-info":
            self.send(self.entries(files, parse_qs(body.decode())["paths"]))
        elif kind == "tree":
            self.send_tree(files, "".join(f"{part}/" for part in rest[2:]))
        elif kind == "preupload":
            self.send({"files": [self.upload_mode(each) for each in json.loads(body)["files"]]})
        elif kind == "commit":
            self.commit(name, files, body)
        else:
            self.send({"error": "not here"}, 404)

    def send_repository(self, name, revision):
        commit = self.hub.commit(name)
        if revision and "/".join(revision) not in ("main", "refs/pr/1", commit):
            self.send({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
            return
        found = {"id": name.partition("/")[2], "sha": commit, "private": False, "siblings": []}
        self.send(found | {"cardData": self.hub.cards.get(name, {})})

    def send_tree(self, files, folder):
        below = [path for path in files if path.startswith(folder)]
        if "recursive=true" not in self.path:
            below = sorted({folder + path.removeprefix(folder).split("/")[0] for path in below})
        self.send([each for path in below for each in self.entries(files, [path])])

    def entries(self, files, wanted):
        found = [self.hub.entry(path, files[path]) for path in wanted if path in files]
        folders = [path for path in wanted if any(file.startswith(f"{path}/") for file in files)]
        return found + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]

    def upload_mode(self, each):
        mode = "lfs" if each["size"] >= self.hub.large else "regular"
        return {"path": each["path"], "uploadMode": mode, "shouldIgnore": False}

    def commit(self, name, files, body):
        for change in map(json.loads, body.decode().splitlines()):
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if change["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        commit = self.hub.commit(name)
        url = f"{self.hub.address}/{name.partition('/')[2]}/commit/{commit}"
        self.send({"commitUrl": url, "commitOid": commit, "success": True})
