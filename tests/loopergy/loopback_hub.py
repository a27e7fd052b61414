# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""A small Hub on this machine, for tests: what the `huggingface_hub` client asks when it publishes and fetches.

Repositories live in memory. Large files come by the LFS protocol, small ones inside the commit, as on the real Hub.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
LARGE = (".safetensors",)


class LoopbackHub(ThreadingHTTPServer):
    """Serve on a free port of the loopback interface; use as a context manager.

    Attributes:
        commits (`dict[str, list[dict[str, bytes]]]`): Repository to its commits, each with all files.
        requests (`list[str]`): Method and path of every request.
        fail_on (`str`): Answer 400 to requests whose path contains this; empty for none.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail_on = ""

    @property
    def address(self) -> str:
        """Return the URL, for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "LoopbackHub":
        """Start serving."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()


def _sha(repo: str, number: int) -> str:
    return hashlib.sha1(f"{repo} {number}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def _answer(self, status: int, body: Any = None, **headers: str) -> None:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _handle(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} /{path}")
        if self.server.fail_on and self.server.fail_on in path:
            self._answer(400, {"error": "broken on purpose"})
        elif self.command in ("POST", "PUT") and not path.startswith("objects/") and not self._has_token():
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif self.command in ("GET", "HEAD"):
            self._read(path.split("/"))
        else:
            self._write(path.split("/"), body)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _write(self, parts: list[str], body: bytes) -> None:
        hub = self.server
        if parts == ["api", "repos", "create"]:
            fields = json.loads(body)
            repo = f"{fields.get('organization') or 'user'}/{fields['name']}"
            known = repo in hub.commits
            hub.commits.setdefault(repo, [{}])
            self._answer(409 if known else 200, {"url": f"{hub.address}/{repo}", "name": repo})
        elif parts[0] == "objects":
            oid = hashlib.sha256(body).hexdigest()
            if oid == parts[1]:
                hub.objects[oid] = body
            self._answer(200 if oid == parts[1] else 400)
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            wanted = json.loads(body)["objects"]
            objects = [
                entry
                if entry["oid"] in hub.objects
                else {**entry, "actions": {"upload": {"href": f"{hub.address}/objects/{entry['oid']}"}}}
                for entry in wanted
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif parts == ["api", "validate-yaml"]:
            self._answer(200, {"errors": [], "warnings": []})
        elif parts[4] == "preupload":
            files = [
                {
                    "path": entry["path"],
                    "uploadMode": "lfs" if entry["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": self._known_oid("/".join(parts[2:4]), entry["path"]),
                }
                for entry in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif parts[4] == "branch":
            self._answer(201, {})
        elif parts[4] == "commit":
            self._commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines() if line.strip()])
        else:
            self._answer(404, {"error": f"not served here: {'/'.join(parts)}"})

    def _known_oid(self, repo: str, path: str) -> str | None:
        content = self.server.commits[repo][-1].get(path)
        if content is None or path.endswith(LARGE):
            return None if content is None else hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def _commit(self, repo: str, lines: list[dict]) -> None:
        hub = self.server
        files = dict(hub.commits[repo][-1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
        hub.commits[repo].append(files)
        sha = _sha(repo, len(hub.commits[repo]) - 1)
        self._answer(
            200,
            {"success": True, "commitOid": sha, "commitUrl": f"{hub.address}/{repo}/commit/{sha}", "hookOutput": ""},
        )

    def _read(self, parts: list[str]) -> None:
        hub = self.server
        if parts[:2] == ["api", "whoami-v2"]:
            self._answer(200 if self._has_token() else 401, {"name": "user", "type": "user", "orgs": []})
            return
        repo = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        if repo not in hub.commits:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        files = hub.commits[repo][-1]
        sha = _sha(repo, len(hub.commits[repo]) - 1)
        if parts[:2] == ["api", "models"]:
            entries = [{"rfilename": path} for path in sorted(files)]
            if "tree" in parts:
                tree = [
                    {"type": "file", "path": path, "size": len(content), "oid": self._known_oid(repo, path)}
                    for path, content in sorted(files.items())
                ]
                self._answer(200, tree)
            else:
                self._answer(200, {"id": repo, "modelId": repo, "sha": sha, "private": False, "siblings": entries})
            return
        path = "/".join(parts[4:])
        if parts[2] != "resolve" or path not in files:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            return
        etag = hashlib.sha256(files[path]).hexdigest()
        self._answer(200, files[path], ETag=f'"{etag}"', X_Repo_Commit=sha)
