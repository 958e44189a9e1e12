"""The part of the Hugging Face Hub that huggingface_hub uses here, on the loopback interface."""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.web_server import serving


class HubServer:
    """Repositories with one revision `main` each: {kind/org/repo: {file: content}}, kind is models or datasets."""

    def __init__(self):
        self.address = ""
        self.repositories = {}
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
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
        if len(content) >= self.large:
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entry |= {"lfs": lfs}
        return entry


@contextmanager
def running_hub():
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

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

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            self.answer(unquote(urlsplit(self.path).path).strip("/").split("/"), b"")

        def do_POST(self):
            self.answer(unquote(urlsplit(self.path).path).strip("/").split("/"), self.body())

        def do_PUT(self):
            content = self.body()
            hub.stored[hashlib.sha256(content).hexdigest()] = content
            self.send(b"", ETag='"1"')

        def answer(self, parts, body):
            hub.requests.append((self.command, self.path))
            hub.tokens.append(self.headers.get("Authorization", ""))
            if parts == ["api", "repos", "create"]:
                request = json.loads(body)
                name = f"{request.get('organization') or 'me'}/{request['name']}"
                hub.repositories.setdefault(f"models/{name}", {})
                return self.send({"url": f"{hub.address}/{name}", "name": name})
            if parts[:2] == ["api", "validate-yaml"]:
                return self.send({"errors": [], "warnings": []})
            if parts[-3:] == ["lfs", "objects", "batch"]:
                objects = [
                    {**each, "actions": {"upload": {"href": f"{hub.address}/put/{each['oid']}"}}}
                    for each in json.loads(body)["objects"]
                ]
                return self.send({"transfer": "basic", "objects": objects})
            if parts[0] == "api":
                name, rest = "/".join(parts[1:4]), parts[4:]
            else:
                kind = "datasets/" if parts[0] == "datasets" else "models/"
                end = parts.index("resolve")
                name, rest = kind + "/".join(parts[end - 2 : end]), []
            files = hub.repositories.get(name)
            if files is None:
                return self.send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            if parts[0] != "api":
                return self.send_file(files, "/".join(parts[parts.index("resolve") + 2 :]), hub.commit(name))
            if not rest or rest[0] == "revision":
                if len(rest) > 1 and rest[1] not in ("main", hub.commit(name)):
                    return self.send({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
                found = {
                    "id": name.partition("/")[2],
                    "sha": hub.commit(name),
                    "private": False,
                    "siblings": [],
                }
                return self.send(found | {"cardData": hub.cards.get(name, {})})
            if rest[0] == "paths-info":
                wanted = parse_qs(body.decode())["paths"]
                return self.send(self.entries(files, wanted))
            if rest[0] == "tree":
                folder = "".join(f"{part}/" for part in rest[2:])
                below = [path for path in files if path.startswith(folder)]
                if "recursive=true" not in self.path:
                    tops = sorted({folder + path.removeprefix(folder).split("/")[0] for path in below})
                    return self.send([each for top in tops for each in self.entries(files, [top])])
                return self.send([hub.entry(path, files[path]) for path in below])
            if rest[0] == "preupload":
                wanted = json.loads(body)["files"]
                modes = [
                    {
                        "path": each["path"],
                        "uploadMode": "lfs" if each["size"] >= hub.large else "regular",
                        "shouldIgnore": False,
                    }
                    for each in wanted
                ]
                return self.send({"files": modes})
            if rest[0] == "commit":
                for line in body.decode().splitlines():
                    change = json.loads(line)
                    value = change["value"]
                    if change["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    if change["key"] == "lfsFile":
                        files[value["path"]] = hub.stored[value["oid"]]
                url = f"{hub.address}/{name.partition('/')[2]}/commit/{hub.commit(name)}"
                return self.send({"commitUrl": url, "commitOid": hub.commit(name), "success": True})
            return self.send({"error": "not here"}, 404)

        def entries(self, files, wanted):
            found = [hub.entry(path, files[path]) for path in wanted if path in files]
            folders = [path for path in wanted if any(file.startswith(f"{path}/") for file in files)]
            return found + [
                {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders
            ]

        def send_file(self, files, path, commit):
            content = files.get(path)
            if content is None:
                return self.send({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            span = self.headers.get("Range", "").removeprefix("bytes=")
            first, _, last = span.partition("-")
            part = content[int(first) : int(last) + 1] if span else content
            return self.send(part, 206 if span else 200, ETag=f'"{commit}"', X_Repo_Commit=commit)

    with serving(Handler) as hub.address:
        yield hub
