"""Weights by name, from a hub on the loopback address: cached, checked, resumed; every fault a clear error."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.core import hub as hugging_face
from headrace.core.addresses import hide_addresses
from headrace.core.errors import ConfigError, DownloadError
from headrace.core.hub import HubRepo, hub_cache, hub_file
from headrace.weights import published
from headrace.weights.named import facts_of, find_file, is_path
from headrace.weights.published import imagenet_names, published_weights
from tests.core.file_server import serving, without_proxies
from tests.weights.hub_server import COMMIT, Hub

DATA = bytes(range(256)) * 2000
REPO = "timm/resnet50.a1_in1k"
CONFIG = {
    "architecture": "resnet50",
    "num_classes": 3,
    "label_names": ["n1", "n2", "n3"],
    "label_descriptions": {"n1": "cat, domestic cat", "n2": "dog", "n3": "cow"},
    "pretrained_cfg": {
        "input_size": [3, 160, 160],
        "interpolation": "bicubic",
        "crop_pct": 0.95,
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
    },
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    without_proxies(monkeypatch)
    for name in ("HF_HOME", "HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(Hub()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories[f"{REPO}/model.safetensors"] = DATA
        yield server


def left(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return sorted(str(path.relative_to(folder)) for path in files)


def test_a_file_is_downloaded_once_into_the_cache_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    path = find_file(REPO)
    folder = tmp_path / "huggingface/hub/models--timm--resnet50.a1_in1k"
    digest = hashlib.sha256(DATA).hexdigest()
    assert path == folder / "snapshots" / COMMIT / "model.safetensors"
    assert path.read_bytes() == DATA
    assert path.resolve() == folder / "blobs" / digest
    assert (folder / "refs/main").read_text() == COMMIT
    assert left(folder) == [f"blobs/{digest}", "refs/main", f"snapshots/{COMMIT}/model.safetensors"]
    num_asked = len(hub.asked)
    assert find_file(f"hf:{REPO}") == find_file(f"hf:{REPO}@{COMMIT}") == path
    assert len(hub.asked) == num_asked, "what is cached needs no network"


def test_an_address_that_is_none_is_refused_when_it_is_downloaded() -> None:
    assert facts_of("http://[::1/x.pth") is None
    with pytest.raises(DownloadError, match="no address of a file to download"):
        find_file("http://[::1/x.pth")


def test_a_revision_with_slashes_is_one_part_of_the_address(hub: Hub, tmp_path: Path) -> None:
    path = find_file(f"hf:{REPO}@refs/pr/1")
    assert path.read_bytes() == DATA
    assert (tmp_path / "huggingface/hub/models--timm--resnet50.a1_in1k/refs/refs/pr/1").read_text() == COMMIT
    num_asked = len(hub.asked)
    assert find_file(f"hf:{REPO}@refs/pr/1") == path
    assert len(hub.asked) == num_asked


def test_two_processes_may_name_a_file_at_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Path.symlink_to
    folder = tmp_path / "huggingface/hub/models--timm--resnet50.a1_in1k"
    path = folder / "snapshots" / COMMIT / "model.safetensors"

    def after_another(self: Path, target: Path) -> None:
        link(path, target)
        link(self, target)

    monkeypatch.setattr(Path, "symlink_to", after_another)
    assert find_file(REPO) == path
    assert path.is_symlink(), "the content stays among the blobs, where other revisions look for it"
    assert path.read_bytes() == DATA


def test_what_huggingface_hub_cached_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "elsewhere/hub/models--a--b/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "pytorch_model.bin").write_bytes(b"weights")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(COMMIT)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_file("hf:a/b").read_bytes() == b"weights"
    assert hub.asked == []
    with pytest.raises(DownloadError, match=r"model.safetensors or pytorch_model.bin of hf:a/c .* HF_HUB_OFFLINE"):
        find_file("hf:a/c")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "third"))
    assert hub_cache() == tmp_path / "third"


def test_a_token_goes_to_the_hub_and_not_to_where_it_redirects(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private.add(REPO)
    with pytest.raises(DownloadError, match=r"401 \(Invalid username or password\).*does not exist, or .*HF_TOKEN"):
        find_file(REPO)
    assert not (tmp_path / "huggingface").exists()
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text("from-file\n")
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.asked.clear()
    find_file(REPO)
    sent = {path: headers.get("authorization") for _, path, headers in hub.asked}
    assert sent == {f"/{REPO}/resolve/main/model.safetensors": "Bearer secret", "/large/model.safetensors": None}
    monkeypatch.delenv("HF_TOKEN")
    hub.repositories[f"{REPO}/config.json"] = b"{}"
    hub_file(HubRepo(name=REPO), ("config.json",))
    assert hub.asked[-1][2]["authorization"] == "Bearer from-file"


def test_a_repository_without_the_file_or_without_itself(hub: Hub) -> None:
    del hub.repositories[f"{REPO}/model.safetensors"]
    hub.repositories[f"{REPO}/README.md"] = b""
    with pytest.raises(DownloadError, match=r"hf:timm/resnet50.a1_in1k has no model.safetensors or pytorch_model.bin"):
        find_file(REPO)
    with pytest.raises(DownloadError, match=r"hf:nobody/nothing: it answers 401"):
        find_file("hf:nobody/nothing")
    with pytest.raises(DownloadError, match=r"Did you mean timm/resnet50.a1h_in1k\?"):
        find_file("timm/resnet50.a1hh_in1k")
    for bad in ("hf:nothing", "hf:../../etc", "hf:a/b@../x"):
        with pytest.raises(DownloadError, match="names no repository"):
            find_file(bad)
    hub.repositories["a/b/pytorch_model.bin"] = b"older"
    assert find_file("hf:a/b").read_bytes() == b"older"


def test_content_that_is_not_the_published_one_is_deleted(hub: Hub, tmp_path: Path) -> None:
    hub.wrong = True
    with pytest.raises(DownloadError, match=r"model.safetensors has the checksum sha256:\w+, not sha256:\w+.*deleted"):
        find_file(REPO)
    assert left(tmp_path) == []
    hub.repositories[f"{REPO}/config.json"] = b'{"a": 1}'
    with pytest.raises(DownloadError, match=r"config.json has the checksum git:\w+, not git:\w+"):
        hub_file(HubRepo(name=REPO), ("config.json",))
    assert left(tmp_path) == []


def test_a_broken_connection_is_resumed(hub: Hub, tmp_path: Path) -> None:
    hub.breaks, hub.cut = 2, 200_000
    assert find_file(REPO).read_bytes() == DATA
    ranges = [headers.get("range") for command, path, headers in hub.asked if "large" in path and command == "GET"]
    assert ranges == [None, "bytes=200000-", "bytes=400000-"]
    assert not [name for name in left(tmp_path) if name.endswith(".part")]


def test_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"resolve/main/model.safetensors cannot be reached: Connection refused"):
        find_file(REPO)
    with pytest.raises(DownloadError, match=r"x\.pth could not be downloaded: .*Connection refused"):
        find_file("http://127.0.0.1:9/x.pth")
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/large")
    hub.files[f"/large/{REPO}/resolve/main/model.safetensors"] = DATA
    with pytest.raises(DownloadError, match=r"does not answer as a Hugging Face hub.*HF_ENDPOINT"):
        find_file(REPO)
    assert left(tmp_path) == []


def test_no_space(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(DownloadError, match=r"no space for model.safetensors in .*1000 B are free.*Free some space"):
        find_file(REPO)
    assert left(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(DownloadError, match=r"no space for model.safetensors"):
        find_file(REPO)
    assert left(tmp_path) == []


def test_a_row_with_an_address_is_checked_by_the_digits_of_its_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = hashlib.sha256(DATA).hexdigest()[:8]
    files = tmp_path / "table"
    files.mkdir()
    rows = ["name,network,options,source,sha256,image,resize,interpolation,pixels,classes"]
    for name, expected in (("right", digits), ("wrong", "deadbeef")):
        rows.append(f"torchvision/{name},resnet18,,{hub.url}/{name}-{expected}.pth,{expected},224,232,bilinear,half,7")
        hub.files[f"/{name}-{expected}.pth"] = DATA
    (files / "published.csv").write_text("\n".join(rows))
    monkeypatch.setattr(published, "FILES", files)
    published_weights.cache_clear()
    published.published_file.cache_clear()
    try:
        assert find_file("torchvision/right").read_bytes() == DATA
        assert find_file("torchvision/right") == tmp_path / f"headrace/weights/right-{digits}.pth"
        with pytest.raises(DownloadError, match=rf"checksum sha256:{digits}\w+, not sha256:deadbeef"):
            find_file("torchvision/wrong")
        assert left(tmp_path / "headrace") == [f"weights/right-{digits}.pth"]
        in_torch = tmp_path / f"torch/hub/checkpoints/right-{digits}.pth"
        in_torch.parent.mkdir(parents=True)
        shutil.move(find_file("torchvision/right"), in_torch)
        assert find_file("torchvision/right") == in_torch, "torch's cache is looked into first"
        # a file or an address of that name is known as well
        network = {"model_name": "resnet18"}
        for name in (f"here/right-{digits}.pth", f"https://example.org/right-{digits}.pth"):
            facts = facts_of(name)
            assert facts is not None
            assert facts.network == network
        with pytest.raises(DownloadError, match="not sha256:deadbeef"):
            find_file(f"{hub.url}/wrong-deadbeef.pth")
    finally:
        published_weights.cache_clear()
        published.published_file.cache_clear()


def test_an_address_with_and_without_a_checksum(hub: Hub, tmp_path: Path) -> None:
    hub.files["/some/file.pth"] = DATA
    address = f"{hub.url}/some/file.pth"
    assert find_file(f"{address}#sha256={hashlib.sha256(DATA).hexdigest()}").read_bytes() == DATA
    assert facts_of(address) is None
    with pytest.raises(DownloadError, match="has the checksum"):
        find_file(f"{address}#sha256=00000000")
    assert find_file(address).read_bytes() == DATA, "the file that was right is still there"
    assert len(left(tmp_path)) == 1
    with pytest.raises(ConfigError, match="#sha256= and 8 to 64 digits"):
        find_file(f"{address}#md5=00")
    with pytest.raises(DownloadError, match=r"missing.pth could not be downloaded: .*404"):
        find_file(f"{hub.url}/missing.pth")


def test_a_signed_address_is_downloaded_and_only_its_hidden_form_is_kept(hub: Hub, tmp_path: Path) -> None:
    hub.files["/w.pth?token=SECRET"] = DATA
    address = f"{hub.url}/w.pth?token=SECRET"
    hidden = hide_addresses(address)
    assert find_file(hidden).read_bytes() == DATA
    assert not any("SECRET" in name for name in left(tmp_path))
    number = len(hub.asked)
    # a process that continues the run has the cached file, without the secret; one without either says what it needs
    program = "import sys; from headrace.weights.named import find_file; print(find_file(sys.argv[1]))"
    again = subprocess.run(
        [sys.executable, "-c", program, hidden],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1])},
    )
    assert Path(again.stdout.strip()).read_bytes() == DATA
    assert len(hub.asked) == number
    with pytest.raises(DownloadError, match="was given with a query or a password, which is not stored"):
        find_file("https://host.example/w.pth?private=0123456789ab")


@pytest.mark.parametrize("revision", ["/abs/path", "a//b", "a/./b", "..", ".", "x" * 300, "a/" + "y" * 5000, "a/"])
def test_a_revision_that_would_lead_out_of_the_cache_is_refused(hub: Hub, tmp_path: Path, revision: str) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    with pytest.raises(DownloadError, match="names no repository"):
        HubRepo.parse(f"a/b@{revision}" if revision != "/abs/path" else f"a/b@{victim}")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("etag", [".", "..", "a" * 300])
def test_an_etag_that_is_no_name_of_a_file_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch, etag: str) -> None:
    monkeypatch.setattr(hugging_face, "_etag", lambda head: etag)
    with pytest.raises(DownloadError, match="does not answer as a Hugging Face hub"):
        hub_file(HubRepo(name=REPO), ("model.safetensors",))


def test_names_that_cannot_be_right() -> None:
    with pytest.raises(ConfigError, match=r"no known weights timm/resnet5O.a1_in1k. Did you mean timm/resnet"):
        facts_of("timm/resnet5O.a1_in1k")
    with pytest.raises(ConfigError, match=r"no known weights torchvision/ResNet50_Weights.IMAGENET1K_V9. Did you mean"):
        find_file("torchvision/ResNet50_Weights.IMAGENET1K_V9")
    with pytest.raises(ConfigError, match="headrace models --weights"):
        find_file("timm/vit_base_patch16_224.x")
    assert is_path("weights.pth")
    assert not is_path("hf:a/b")


def test_what_comes_with_a_known_name() -> None:
    facts = facts_of("timm/resnet50.a1_in1k")
    assert facts is not None
    assert facts.network == {"model_name": "resnet50", "model_dialect": "timm"}
    assert facts.data == {
        "image_size": 224,
        "eval_resize_size": 235,
        "eval_interpolation": "bicubic",
        "pixel_mean": (0.485, 0.456, 0.406),
        "pixel_std": (0.229, 0.224, 0.225),
    }
    assert facts.class_names[:2] == ("tench", "goldfish")
    facts = facts_of("torchvision/ResNet50_Weights.IMAGENET1K_V2")
    assert facts is not None
    assert facts.network["model_dialect"] == "torchvision"
    assert (facts.data["eval_resize_size"], facts.data["eval_interpolation"]) == (232, "bilinear")
    assert len(set(imagenet_names())) == 1000


def test_what_a_repository_says(hub: Hub) -> None:
    hub.repositories["me/cows/config.json"] = json.dumps(CONFIG).encode()
    facts = facts_of("hf:me/cows")
    assert facts is not None
    assert facts.network == {"model_name": "resnet50", "model_dialect": "timm"}
    assert facts.class_names == ("cat", "dog", "cow")
    assert facts.data == {
        "image_size": 160,
        "eval_resize_size": 168,
        "eval_interpolation": "bicubic",
        "pixel_mean": (0.1, 0.2, 0.3),
        "pixel_std": (0.4, 0.5, 0.6),
    }
    # as timm wrote it before: everything on one level
    flat = {"architecture": "resnet50", "num_classes": 1000, "crop_pct": 1.0, "mean": [0, 0, 0], "std": [1, 1, 1]}
    hub.repositories["me/old/config.json"] = json.dumps(flat).encode()
    facts = facts_of("hf:me/old")
    assert facts is not None
    assert facts.data["normalization"] == "zero-one"
    assert facts.class_names == imagenet_names()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (b"[1]", "cannot be read"),
        (b"{", "cannot be read"),
        (b'{"architecture": "vit_tiny"}', "describes the network vit_tiny, which Headrace does not have"),
        (
            b'{"architectures": ["ResNetForImages"]}',
            r"no network of timm \(ResNetForImages\)",
        ),
        (b'{"architecture": "resnet50", "num_classes": "many"}', "not as timm writes it"),
        (b'{"architecture": "resnet50", "num_classes": 1, "input_size": [3, 1e400]}', "not as timm writes it"),
        (b'{"architecture": "resnet50", "num_classes": 1, "input_size": []}', "not as timm writes it"),
        (b'{"architecture": "resnet50", "num_classes": 1, "crop_pct": 0}', "not as timm writes it"),
    ],
)
def test_a_repository_that_describes_something_else(hub: Hub, config: bytes, problem: str) -> None:
    hub.repositories["me/x/config.json"] = config
    with pytest.raises(ConfigError, match=problem):
        facts_of("hf:me/x")
