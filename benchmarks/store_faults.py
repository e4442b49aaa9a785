"""Kill runs that are kept in a bucket, on a server and a link that fail: what was tried, and what was lost.

    pip install 'moto[server,s3]'   # in an environment of its own; `--moto` is its moto_server
    python benchmarks/store_faults.py --moto ENVIRONMENT/bin/moto_server --kills 50

A proxy between the runs and moto's S3 server answers 503, cuts answers and requests, loses answers of what was done,
and limits the rate. Each process that is killed is continued by one that has nothing but the bucket.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


class Proxy(ThreadingHTTPServer):
    """Forwards to `port` and fails with these shares; counts what it did."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.port, self.rng = port, random.Random(0)
        self.shares: dict[str, float] = {}
        self.rate: float | None = None
        self.counts: Counter[str] = Counter()
        self.manifests = 0  # of checkpoints, that were put
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fault(self, path: str) -> str:
        with self.lock:
            draw, chosen = self.rng.random(), ""
            for name, share in self.shares.items():
                if not chosen and draw < share:
                    chosen = name
                draw -= share
            self.counts[chosen or "good"] += 1
            return chosen

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:  # killed while it sent
            self.close_connection = True
            return None
        fault = self.server.fault(self.path)
        if self.command == "PUT" and self.path.partition("?")[0].endswith("manifest.json"):
            self.server.manifests += 1
        if fault == "503":
            return self._send(503, [], b"<Error><Code>SlowDown</Code><Message>on purpose</Message></Error>")
        if fault == "request cut":
            self.close_connection = True
            return None
        if self.server.rate:
            time.sleep(size / self.server.rate)
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if fault == "answer lost":  # it was done, and nobody is told
            self.close_connection = True
            return None
        return self._send(answer.status, answer.getheaders(), data, cut=fault == "answer cut")

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _handle

    def _send(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
        for name, value in headers:
            if name.lower() not in HOP | {"content-length"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if cut and data:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        rate = self.server.rate
        for first in range(0, len(data), 1 << 15):
            self.wfile.write(data[first : first + (1 << 15)])
            if rate:
                time.sleep((1 << 15) / rate)


def start_moto(program: str) -> tuple[subprocess.Popen[bytes], int]:
    port = random.Random(os.getpid()).randrange(20000, 40000)
    process = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(200):
        try:
            http.client.HTTPConnection("127.0.0.1", port, timeout=1).request("GET", "/")
            return process, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit("moto does not answer")


WORDS = shlex.split("""
    --config none --dataset digits --model-name toy_model_bn --micro-batch-size 16 --weight-updates-per-epoch 12
    --ckpts-per-epoch 3 --ema-decay 0.9 --progress none --max-ckpts-to-keep 2
""")


def headrace(*words: object, cache: Path, programs: Path) -> subprocess.Popen[bytes]:
    environ = os.environ | {"XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "headrace", *map(str, words), "--compilation-cache-dir", str(programs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moto", required=True)
    parser.add_argument("--kills", type=int, default=50)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    moto, port = start_moto(args.moto)
    proxy = Proxy(port)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        from headrace.core.store import open_store

        open_store("s3://bucket/x", writes=True).system.mkdir("bucket")
        kills(proxy, folder, args.kills)
    finally:
        moto.kill()
        shutil.rmtree(folder, ignore_errors=True)


def kills(proxy: Proxy, folder: Path, count: int) -> None:
    from headrace.checkpoint.store import load, newest_good
    from headrace.checkpoint.upload import whole_checkpoints
    from headrace.core.store import open_store
    from headrace.core.stored_copy import walk
    from headrace.run.stored_run import bring_run

    run, programs, epochs = "s3://bucket/runs/one", folder / "programs", max(100, count * 40)
    words = ("train", *WORDS, "--num-epochs", epochs)
    whole = headrace(*words, "--output", folder / "whole", cache=folder / "plain", programs=programs)
    assert whole.wait() == 0, whole.stdout and whole.stdout.read().decode()[-2000:]
    rng, saved, lost, killed, in_upload, ended = random.Random(1), 0, 0, 0, 0, ""
    for number in range(count):
        proxy.shares = {"503": 0.05, "request cut": 0.03, "answer cut": 0.03, "answer lost": 0.03}
        proxy.rate = 3e6
        before = proxy.manifests
        process = headrace(
            *words, "--output", run, "--resume", "auto", cache=folder / f"machine-{number}", programs=programs
        )
        while process.poll() is None and proxy.manifests == before:  # it has saved something there
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 2))
        if process.poll() is not None:
            ended = process.stdout.read().decode()[-1500:] if process.stdout else ""
            if process.returncode:
                print(ended)
            break
        process.kill()
        process.wait()
        killed += 1
        time.sleep(0.3)  # what the proxy had taken is done
        proxy.shares, proxy.rate = {}, None
        files = walk(open_store(run))
        names = whole_checkpoints(files)
        in_upload += any(
            name.endswith("state.safetensors") and name.replace("state.safetensors", "manifest.json") not in files
            for name in files
        )
        newest = int(names[-1].removeprefix("step_")) if names else 0
        lost += newest < saved
        saved = max(saved, newest)
        shutil.rmtree(folder / f"machine-{number}", ignore_errors=True)
    proxy.shares = {"503": 0.05, "request cut": 0.03, "answer cut": 0.03, "answer lost": 0.03}
    last = headrace(*words, "--output", run, "--resume", "auto", cache=folder / "last", programs=programs)
    code = last.wait()
    if code:
        print(last.stdout.read().decode()[-2000:] if last.stdout else "")
    proxy.shares = {}
    os.environ["XDG_CACHE_HOME"] = str(folder / "reader")
    found, right = (newest_good(place / "checkpoints")[0] for place in (bring_run(run), folder / "whole"))
    assert found is not None
    assert right is not None
    arrays = [load(path)[0] for path in (found, right)]
    same = arrays[0].keys() == arrays[1].keys() and all(
        arrays[0][name].tobytes() == arrays[1][name].tobytes() for name in arrays[0]
    )
    facts = {"kills": killed, "in an upload": in_upload, "checkpoints lost": lost, "at step": saved}
    print(json.dumps(facts | {"exit code of the last": code, "same bits": same, "requests": dict(proxy.counts)}))


if __name__ == "__main__":
    main()
