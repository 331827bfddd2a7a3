"""An export on its way to the Hub: a stand-in on this machine takes what huggingface_hub's own client sends."""

import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deepspec import export
from deepspec.errors import UserError
from deepspec.interop.hub import push
from tests.interop.test_stages import config, model  # noqa: F401  fixtures


class Hub(BaseHTTPRequestHandler):
    """Takes one repository; `server.seen` are its requests, `server.files` what was committed."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        if self.headers.get("Authorization") != "Bearer right":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.base}/me/draft", "name": "me/draft"})
        if self.path.startswith("/api/models/me/draft/preupload"):
            files = json.loads(body)["files"]
            return self.answer(
                {"files": [{**f, "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        if "/commit/" not in self.path:  # the card's head, looked at beforehand
            return self.answer({"errors": [], "warnings": []})
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                content = base64.b64decode(item["value"]["content"])
                self.server.files[item["value"]["path"]] = content  # type: ignore[attr-defined]
        return self.answer(
            {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.base}/me/draft/commit/{'0' * 40}"}
        )

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, content: Any, status: int = 200) -> None:
        said = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.files = [], {}
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_every_file_arrives_with_the_environments_token(
    hub: Any, online: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "right")
    files = {"config.json": b"{}", "README.md": b"# A draft\n", "model.safetensors": bytes(range(64))}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert push(tmp_path, "me/draft", private=True, endpoint=hub.url) == f"{hub.url}/me/draft"
    assert hub.files == files
    made = json.loads(hub.seen[0][2])
    assert (made["name"], made["organization"]) == ("draft", "me")
    assert made.get("private") is True or made.get("visibility") == "private"  # by the client's version


def test_the_hubs_refusal_is_said(
    hub: Any, online: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(
        UserError, match=r"me/draft could not be uploaded \(.*401.*The export itself is whole"
    ):
        push(tmp_path, "me/draft", private=True, endpoint=hub.url)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(UserError, match="could not be uploaded"):
        push(tmp_path, "me/draft", private=True, endpoint=hub.url)


@pytest.mark.parametrize(
    ("changes", "token", "words"),
    [
        ({"hub_repo": None}, "right", r"hub_repo=OWNER/NAME, not None"),
        ({"hub_repo": "draft"}, "right", r"hub_repo=OWNER/NAME, not draft"),
        ({"serve_target": None}, "right", r"a folder of this machine.*serve_target=OWNER/NAME"),
        ({}, "", r"environment variable HF_TOKEN"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_written(
    config: Any,  # noqa: F811
    changes: dict[str, Any],
    token: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    asked = {"push_to_hub": True, "hub_repo": "me/draft", "serve_target": "org/small", **changes}
    with pytest.raises(UserError, match=words):
        export.run(dataclasses.replace(config, **asked))
    assert not (Path(config.out) / "export").exists()


def test_an_export_is_pushed_under_the_names_that_others_find(
    config: Any,  # noqa: F811
    hub: Any,
    online: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "right")
    monkeypatch.setattr(export, "push", lambda *given: push(*given, endpoint=hub.url))
    asked = {"push_to_hub": True, "hub_repo": "me/draft", "serve_target": "org/small"}
    folder = export.run(dataclasses.replace(config, **asked))
    assert f"pushed    {hub.url}/me/draft" in capsys.readouterr().out
    assert set(hub.files) == {path.name for path in folder.iterdir()}
    card = hub.files["README.md"].decode()
    assert (
        "vllm serve org/small" in card and '"model": "me/draft"' in card and 'base_model: "org/small"' in card
    )
    said = json.loads(hub.files["config.json"])["speculators_config"]["verifier"]["name_or_path"]
    assert said == "org/small"
