# SPDX-License-Identifier: Apache-2.0
"""A small server that speaks the part of the Hugging Face Hub's API that pushing and pulling a model uses, over real
HTTP.

Create repository, preupload, LFS batch, upload and verify, commit, resolve, model information, tree and branches. Large
files travel by plain LFS, so the client must run with `HF_HUB_DISABLE_XET=1`.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


TOKEN = "hf_right"


class Repo:
    """One repository: each commit maps paths to contents, each branch names a commit."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit("main", {})

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        revision = revision.removeprefix("refs/heads/")
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


class HubServer:
    """The server and what it holds; a context manager that serves while it is open.

    Attributes:
        url: what `HF_ENDPOINT` is to be.
        repos: repositories by ``org/name``.
        broken_uploads: so many of the next LFS uploads are cut off in the middle, each time by closing the connection.
        requests: ``"METHOD path"`` of everything that was asked, in order.
        unreachable: ``org/name/path`` of files that are asked for in vain: the gateway's time is up.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.broken_uploads = 0
        self.requests: list[str] = []
        self.unreachable: set[str] = set()
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self, cache: str, token: str = TOKEN) -> dict[str, str]:
        """What a client process needs in its environment to talk to this server and to nothing else."""
        places = {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": cache, "HF_HUB_OFFLINE": "0"}
        switches = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_SAFETENSORS_CONVERSION")
        return places | dict.fromkeys(switches, "1")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_) -> None:
        pass

    # ---- answers ----------------------------------------------------------------------------------------------------

    def answer(self, body: object = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if not isinstance(body, bytes):
            self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        self.answer(
            {"error": message}, status, {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        )

    # ---- requests ---------------------------------------------------------------------------------------------------

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        self.hub.requests.append(f"{self.command} {url.path}")
        if self.command == "PUT" and parts[0] == "lfs-objects":
            return self.upload(parts[1])
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            return self.refuse(401, "Invalid username or password.")
        with self.hub.lock:
            if self.command == "POST":
                if self.headers.get("Authorization") is None:
                    return self.refuse(401, "Invalid username or password.")
                return self.post(parts, body)
            return self.get(parts, parse_qs(url.query))

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def post(self, parts: list[str], body: bytes) -> None:
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            answer = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
            if name in self.hub.repos:
                return self.answer({**answer, "error": "You already created this model repo"}, 409)
            self.hub.repos[name] = Repo()
            return self.answer(answer)
        if parts == ["api", "validate-yaml"]:
            return self.answer({"errors": [], "warnings": []})
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            return self.answer(
                {"transfer": "basic", "objects": [self.instruct(o) for o in json.loads(body)["objects"]]}
            )
        if parts[0] == "lfs-verify":
            known = json.loads(body)["oid"] in self.hub.objects
            return self.answer() if known else self.refuse(404, "this object was not uploaded")
        if parts[:2] == ["api", "models"] and (repo := self.repo(parts[2:4])) is not None:
            what, *rest = parts[4:]
            if what == "preupload":
                return self.answer({"files": [_upload_mode(file) for file in json.loads(body)["files"]]})
            if what == "commit":
                return self.commit(repo, "/".join(parts[2:4]), rest[0], body)
            if what == "branch":
                repo.branches.setdefault(rest[0], repo.branches["main"])
                return self.answer()
            if what == "paths-info":
                asked = parse_qs(body.decode()).get("paths", []) if body[:1] != b"{" else json.loads(body)["paths"]
                files = repo.commits[repo.resolve(rest[0])]
                return self.answer([_entry(path, files[path]) for path in asked if path in files])
        self.refuse(404, f"no such address: {'/'.join(parts)}")

    def get(self, parts: list[str], query: dict[str, list[str]]) -> None:
        if parts == ["api", "whoami-v2"]:
            return self.answer({"name": "me", "type": "user", "orgs": [{"name": "org"}]})
        is_api = parts[:2] == ["api", "models"]
        name = parts[2:4] if is_api else parts[:2]
        repo = self.repo(name)
        rest = parts[4:] if is_api else parts[2:]
        if repo is None:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        if rest[:1] == ["refs"]:
            branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c} for b, c in repo.branches.items()]
            return self.answer({"branches": branches, "converts": [], "tags": [], "pullRequests": []})
        sha = repo.resolve(rest[1] if len(rest) > 1 else "main")
        if sha is None:
            return self.refuse(404, "Invalid rev id", "RevisionNotFound")
        files = repo.commits[sha]
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            return self.answer({"_id": "0", "id": "/".join(name), "sha": sha, "siblings": siblings, "tags": []})
        if rest[0] == "tree":
            return self.answer([_entry(path, content) for path, content in files.items()])
        if rest[0] == "resolve":
            path = "/".join(rest[2:])
            if "/".join([*name, path]) in self.hub.unreachable:
                return self.refuse(504, "Gateway Time-out")
            if path not in files:
                return self.refuse(404, "Entry not found", "EntryNotFound")
            oid = hashlib.sha256(files[path]).hexdigest()
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(files[path]))}
            return self.answer(files[path], headers={"X-Repo-Commit": sha, "ETag": f'"{oid}"', **linked})
        self.refuse(404, f"no such address: {'/'.join(parts)}")

    # ---- parts of them ----------------------------------------------------------------------------------------------

    def repo(self, name: list[str]) -> Repo | None:
        return self.hub.repos.get("/".join(name))

    def instruct(self, asked: dict) -> dict:
        """How to upload one LFS object; nothing to do where the server has it."""
        if asked["oid"] in self.hub.objects:
            return asked
        upload, verify = (f"{self.hub.url}/{what}/{asked['oid']}" for what in ("lfs-objects", "lfs-verify"))
        return {**asked, "actions": {"upload": {"href": upload}, "verify": {"href": verify}}}

    def upload(self, oid: str) -> None:
        length = int(self.headers["Content-Length"])
        with self.hub.lock:
            broken = self.hub.broken_uploads > 0
            self.hub.broken_uploads -= broken
        content = self.rfile.read(length // 2 if broken else length)
        if broken:
            self.close_connection = True
            self.connection.close()
            return
        if hashlib.sha256(content).hexdigest() != oid:
            return self.refuse(400, "the content does not match its checksum")
        self.hub.objects[oid] = content
        self.answer()

    def commit(self, repo: Repo, name: str, revision: str, body: bytes) -> None:
        files = dict(repo.commits[repo.resolve(revision)])
        for line in body.splitlines():
            key = (entry := json.loads(line))["key"]
            value = entry["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self.refuse(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(revision.removeprefix("refs/heads/"), files)
        self.answer({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})


def _upload_mode(file: dict) -> dict:
    mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _entry(path: str, content: bytes) -> dict:
    entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
