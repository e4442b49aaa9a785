"""A page on this machine to drop a photograph into: the classes that a trained network sees, and where it looked."""

import tempfile
import threading
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.core.errors import HeadraceError
from headrace.data.decoding.image import readable_extensions
from headrace.report.images import image_address
from headrace.report.markup import element, page
from headrace.report.server import Access, Answer, Query, Routes, json_answer, make_pages_server
from headrace.run.grad_cam import Explainer, Explanation, color_text, overlays
from headrace.weights.weights import Weights

_SIDE = 360  # pixels of an image on the page


def make_demo(weights: Weights, title: str, address: tuple[str, int], access: Access) -> ThreadingHTTPServer:
    """Return a server of the page for a network; port 0 takes a free one."""
    demo = _Demo(weights, title, access.token)
    return make_pages_server(Routes(get={"/": demo.page}, post={"/api/explain": demo.explain}), address, access)


class _Demo:
    def __init__(self, weights: Weights, title: str, token: str) -> None:
        self._names, self._title, self._task = weights.class_names, title, weights.task
        self._query = f"?token={quote(token)}" if token else ""
        self._explainer, self._lock = Explainer(weights), threading.Lock()

    def page(self, query: Query) -> Answer:
        kinds = ",".join(readable_extensions())
        drop = element(
            "label",
            element("b", "Drop a photograph here"),
            element("span", "or choose a file, or paste one", class_="faint"),
            element("input", type="file", accept=f"image/*,{kinds}", id="file"),
            id="drop",
            class_="drop",
        )
        names = ", ".join(self._names[:10]) + (f" and {len(self._names) - 10:,} more" if len(self._names) > 10 else "")
        scale = "linear-gradient(90deg, " + ", ".join(color_text(k / 8) for k in range(9)) + ")"
        legend = element(
            "div",
            element("span", f"evidence for the {self._task.output}: none"),
            element("i", style=f"background: {scale}"),
            element("span", "most"),
            class_="legend",
        )
        body = [
            element("h1", self._title),
            element("div", f"{len(self._names):,} {self._task.outputs}: {names}", class_="faint"),
            element("div", class_="problem", id="connection"),
            element("section", drop, element("p", "", class_="faint", id="told")),
            element(
                "section",
                element("h2", self._task.outputs.capitalize()),
                element("div", id="scores", class_="scores"),
                element("h2", "Where it looked"),
                element("div", id="maps", class_="maps"),
                legend,
                id="answer",
                hidden="",
            ),
        ]
        return Answer(page(self._title, body, {"demo": f"api/explain{self._query}"}).encode())

    def explain(self, query: Query, body: bytes) -> Answer:
        """Answer with the best classes of the image that was sent, and maps for the first, or for the class asked."""
        asked = query.get("class", [None])[0]
        with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
            file = Path(folder) / "the image"
            file.write_bytes(body)
            try:
                with self._lock:  # one at a time: there is one device
                    found = self._explainer.explain(file, asked)
            except HeadraceError as error:
                problem = error.problem.replace(str(file), "the image")
                return json_answer({"problem": problem}, HTTPStatus.UNPROCESSABLE_ENTITY)
        return json_answer(_facts(found))


def _facts(found: Explanation) -> dict[str, Any]:
    drawn = overlays(found, max(_SIDE, found.pixels.shape[1]))
    titles = {"image": "as the network gets it"} | {name: f"for {found.name}, {name}" for name in found.maps}
    return {
        "name": found.name,
        "best": [
            {"name": name, "share": value if found.task.are_shares else None, "text": found.task.text(value)}
            for name, value in found.best
        ],
        "maps": [{"title": titles[name], "image": image_address(image, "PNG")} for name, image in drawn.items()],
    }
