"""`headrace demo`: the page over real HTTP and in a browser, the same numbers as predict, and what it refuses."""

import base64
import http.client
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.cli.demo import demo
from headrace.core.errors import ConfigError
from headrace.report.server import LOCAL, MOST_BYTES, Access
from headrace.run.demo import make_demo
from headrace.run.fit import train
from headrace.run.prediction import predict
from headrace.run.read_weights import read_weights
from headrace.weights.weights import Weights
from tests.report.browser import PROGRAM, start_browser


@pytest.fixture
def model(quick: Callable[..., Any]) -> Weights:
    result = train(quick(num_epochs=1, weight_updates_per_epoch=2, validations_per_epoch=0))
    return read_weights(result.directory).only()


@contextmanager
def serving(model: Weights, access: Access) -> Iterator[int]:
    server = make_demo(model, "a <b> network", ("127.0.0.1", 0), access)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = line.getresponse()
    found = answer.status, answer.read()
    line.close()
    return found


def test_the_page_shows_what_predict_says_and_refuses_others(model, tmp_path: Path, capsys):
    file = tmp_path / "seven.png"
    Image.fromarray(np.arange(1024, dtype=np.uint8).reshape(32, 32)).save(file)
    wanted = next(iter(predict(model, [file])))
    with serving(model, Access()) as port:
        status, body = ask(port, "GET", "/")
        assert status == 200
        assert b"a &lt;b&gt; network" in body
        status, body = ask(port, "POST", "/api/explain", file.read_bytes())
        assert status == 200
        found = json.loads(body)
        assert [row["name"] for row in found["best"]] == [model.class_names[label] for label, _ in wanted.best]
        shares = [row["share"] for row in found["best"]]
        np.testing.assert_allclose(shares, [share for _, share in wanted.best], atol=1e-5)
        for row in found["maps"]:
            with Image.open(io.BytesIO(base64.b64decode(row["image"].partition(",")[2]))) as image:
                assert image.width == 360
        last = found["best"][-1]["name"]
        assert json.loads(ask(port, "POST", f"/api/explain?class={last}", file.read_bytes())[1])["name"] == last
        assert ask(port, "POST", "/api/explain?class=x", file.read_bytes())[0] == 422
        status, body = ask(port, "POST", "/api/explain", b"no image")
        assert (status, json.loads(body)) == (422, {"problem": "Cannot read the image: not an image."})
        own = f"http://127.0.0.1:{port}"
        assert ask(port, "POST", "/api/explain", file.read_bytes(), Origin=own)[0] == 200
        assert ask(port, "POST", "/api/explain", file.read_bytes(), Origin="http://example.org")[0] == 403
        assert ask(port, "POST", "/api/explain", file.read_bytes(), Host="example.org")[0] == 403
        assert ask(port, "POST", "/api/explain", None, Content_Length=str(MOST_BYTES + 1))[0] == 413
        assert ask(port, "POST", "/api/explain", None, Content_Length="-1")[0] == 411
        assert ask(port, "GET", "/api/explain")[0] == 404
        assert ask(port, "POST", "/")[0] == 404
    with serving(model, Access(hosts=LOCAL, token="abc")) as port:
        assert ask(port, "GET", "/")[0] == 403
        assert ask(port, "POST", "/api/explain", file.read_bytes())[0] == 403
        assert ask(port, "POST", "/api/explain?token=abc", file.read_bytes())[0] == 200
        if PROGRAM is not None:
            _look(tmp_path, f"http://127.0.0.1:{port}/?token=abc", file, found)


def _look(place: Path, address: str, file: Path, found: dict[str, Any]) -> None:
    with start_browser(place / "profile") as browser:
        try:
            page = browser.open(address)
        except (AssertionError, OSError):  # a container that lacks what it needs
            return
        root = page.send("DOM.getDocument")["root"]["nodeId"]
        node = page.send("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        page.send("DOM.setFileInputFiles", files=[str(file)], nodeId=node)
        page.wait("document.querySelectorAll('#maps img').length > 0")
        texts = page.evaluate("[...document.querySelectorAll('.score')].map(each => each.textContent)")
        assert texts == [f"{row['name']}{100 * row['share']:.2f} %" for row in found["best"]]
        page.evaluate("document.querySelectorAll('.score')[1].click()")
        page.wait("document.querySelectorAll('.score')[1].getAttribute('aria-pressed') === 'true'")
        for width in (400, 800, 1600):
            page.look(width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.problems == []
        assert all(re.match(r"data:|http://127\.0\.0\.1:", each) for each in page.requests)


def test_what_cannot_be_served_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="The port is 70000"):
        demo([str(tmp_path), "--port", "70000"])
    with pytest.raises(ConfigError, match="No run and no weights are named"):
        demo([])
