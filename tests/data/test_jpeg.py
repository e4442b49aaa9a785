"""The compiled JPEG decoder: its pixels are libjpeg's to the bit, and damage never passes, crashes or hangs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from headrace.data.decoding import image_source
from headrace.data.decoding.crop import CROP_RULES
from headrace.data.decoding.image import BadImage, read_header
from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.decoding.jpeg import JpegDecoder, jpeg_decoder
from headrace.data.decoding.resize import View
from headrace.data.sets.bad_samples import BadSamples
from headrace.native import library

from .image_files import ObjectSamples, encode, smooth

RNG = np.random.default_rng(5)
FORMS = [
    *({"subsampling": sub, "quality": quality} for sub in (0, 1, 2) for quality in (30, 97)),
    {"restart_marker_rows": 1},
    {"restart_marker_blocks": 3, "subsampling": 0},
    {"optimize": True, "quality": 85},
]


@pytest.fixture
def decoder() -> JpegDecoder:
    """Return the compiled decoder; tests/native fails where there is a compiler and no decoder."""
    found = jpeg_decoder()
    if found is None:
        pytest.skip("not compiled")
    return found


def rough(height: int, width: int, seed: int) -> np.ndarray:
    """Return an image with edges, flat parts and noise."""
    rng = np.random.default_rng(seed)
    pixels = smooth(height, width, seed).astype(int) + rng.integers(-40, 41, (height, width, 1))
    pixels[: height // 3, : width // 2] = rng.integers(0, 256, 3)
    pixels[height // 2 :, width // 2 :: 3] = 255
    return np.clip(pixels, 0, 255).astype(np.uint8)


def by_libjpeg(data: bytes, channels: int = 3, factor: int = 1) -> np.ndarray:
    """Decode with libjpeg's quick settings; ValueError where it would warn."""
    header = simplejpeg.decode_jpeg_header(data, strict=False)
    height, width = int(header[0]), int(header[1])
    tall, wide = -(-height // factor), -(-width // factor)
    kind = "RGB" if channels == 3 else "GRAY"
    pixels = simplejpeg.decode_jpeg(
        data, kind, min_height=tall, min_width=wide, min_factor=factor, fastdct=True, fastupsample=True
    )
    return pixels.reshape(tall, wide, channels)


def assert_same(decoder: JpegDecoder, data: bytes, crops: int = 3) -> None:
    for factor in (1, 2, 4, 8):
        for channels in (3, 1):
            want = by_libjpeg(data, channels, factor)
            boxes = [(0, 0, *want.shape[:2])]
            for _ in range(crops):
                top, left = (int(RNG.integers(0, side)) for side in want.shape[:2])
                boxes.append(
                    (
                        top,
                        left,
                        *(int(RNG.integers(1, s - t + 1)) for s, t in zip(want.shape, (top, left), strict=False)),
                    )
                )
            for top, left, height, width in boxes:
                out = np.zeros((height, width, channels), np.uint8)
                crop = (top * factor, left * factor, height * factor, width * factor)
                assert decoder.decode_into(data, View(crop, (height, width)), out, factor)
                assert (out == want[top : top + height, left : left + width]).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("hw", [(16, 16), (75, 101), (200, 35), (9, 130)])
def test_pixels_are_libjpegs_to_the_bit(decoder: JpegDecoder, form: dict, hw: tuple[int, int]) -> None:
    assert_same(decoder, encode(rough(*hw, seed=hw[0]), **form))


def test_grey_pixels_are_libjpegs_to_the_bit(decoder: JpegDecoder) -> None:
    assert_same(decoder, encode(rough(77, 90, seed=1)[:, :, 0]))
    assert_same(decoder, encode(rough(77, 90, seed=1)[:, :, 0], restart_marker_rows=1))


def test_colours_of_half_the_height_are_libjpegs_to_the_bit(decoder: JpegDecoder) -> None:
    # No encoder at hand writes them. Units of 16 x 8 pixels become 8 x 16 by changing the header: mixed up, but valid.
    data = bytearray(encode(rough(64, 96, seed=2), subsampling=1))
    frame = data.index(b"\xff\xc0")
    assert data[frame + 11] == 0x21
    data[frame + 11] = 0x12
    data[frame + 5 : frame + 9] = (128).to_bytes(2, "big") + (48).to_bytes(2, "big")
    assert_same(decoder, bytes(data))


@pytest.mark.parametrize("rule", ["torchvision", "reference"])
def test_views_do_not_depend_on_the_decoder(decoder: JpegDecoder, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(60, 80), (300, 200), (501, 640), (97, 33), (1000, 900)]
    images = [(encode(rough(*hw, seed=n), **FORMS[n % len(FORMS)]), 0) for n, hw in enumerate(sizes * 2)]
    source = decoded_source(
        ObjectSamples(images), ViewSpec(size=112, crop=CROP_RULES[rule]), "train", BadSamples("set", 10, 0.0)
    )
    index = np.arange(len(images))
    shown = [source.read(index, epoch) for epoch in range(4)]
    monkeypatch.setattr(image_source, "jpeg_decoder", lambda: None)
    for epoch, images in enumerate(shown):
        assert (images == source.read(index, epoch)).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_other_images_are_left_to_others(decoder: JpegDecoder, kind: str) -> None:
    assert decoder.header(encode(smooth(20, 30), kind)) is None
    assert decoder.header(b"") is None
    assert decoder.header(encode(smooth(20, 30), progressive=True)) is None


def test_the_header_says_what_others_read(decoder: JpegDecoder) -> None:
    from PIL import Image

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encode(smooth(20, 30), exif=exif)
        assert decoder.header(data) == read_header(data)


def test_what_passes_whole_is_what_libjpeg_passes(decoder: JpegDecoder) -> None:
    """Damage is either noticed, or libjpeg finds nothing wrong and gives the same pixels."""
    rng = np.random.default_rng(3)
    passed = refused = 0
    for number, form in enumerate(FORMS):
        data = encode(rough(50, 70, seed=number), **form)
        for _ in range(150):
            changed = bytearray(data[: int(rng.integers(2, len(data)))] if rng.random() < 0.2 else data)
            for _ in range(int(rng.integers(1, 4))):
                changed[int(rng.integers(0, len(changed)))] = int(rng.integers(0, 256))
            header = decoder.header(bytes(changed))
            if header is None or header.height * header.width > 10**6:
                refused += 1
                continue
            out = np.zeros((header.height, header.width, 3), np.uint8)
            if header.orientation != 1 or not decoder.decode_into(
                bytes(changed), View((0, 0, *out.shape[:2]), out.shape[:2]), out
            ):
                refused += 1
                continue
            passed += 1
            assert (out == by_libjpeg(bytes(changed))).all()
    assert passed > 100
    assert refused > 100


def test_a_file_cut_short_is_bad_whatever_its_crop(decoder: JpegDecoder) -> None:
    data = encode(rough(120, 90, seed=1))
    look = ViewSpec(size=32, crop=CROP_RULES["torchvision"])
    out = np.zeros((32, 32, 3), np.uint8)
    for length in (len(data) - 2, len(data) * 3 // 4, len(data) // 2):
        for epoch in range(5):
            with pytest.raises(BadImage):
                image_source.decode_into(ObjectSamples([(data[:length], 0)]), 0, epoch, look, out, None)


def test_a_crop_that_does_not_lie_in_the_image_is_refused(decoder: JpegDecoder) -> None:
    data, out = encode(smooth(20, 30)), np.zeros((5, 5, 3), np.uint8)
    for crop in [(-1, 0, 5, 5), (0, 26, 5, 5), (16, 0, 5, 5), (0, 0, 0, 5)]:
        assert not decoder.decode_into(data, View(crop, (5, 5)), out)


EACH_BUILD = pytest.mark.parametrize("flags", [["-mavx2", "-mbmi", "-mbmi2"], []], ids=["AVX2", "portable"])


def watched_build(source: str, code: str, flags: list[str], folder: Path) -> str:
    """Compile a program of this folder with C code of the package and the sanitizers; return its path."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    files = Path(library.__file__).parent
    sources = [str(path) for path in sorted(files.glob(code))]
    watched = ["-g", "-O1", "-fwrapv", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{files}"]
    program = str(folder / "fuzz")
    words = [compiler, *flags, *watched, "-o", program, str(Path(__file__).parent / source), *sources, "-lm"]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("the compiler has no sanitizers")
    return program


@EACH_BUILD
def test_resizing_stays_within_its_images(tmp_path: Path, flags: list[str]) -> None:
    """Both filters, both orders, images of a single column: rows near the end of an image are not read over."""
    program = watched_build("fuzz_resize.c", "resize.c", flags, tmp_path)
    done = subprocess.run([program, "8000", "1"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "8000\n"


@pytest.mark.slow
@EACH_BUILD
def test_damaged_jpegs_do_no_harm(tmp_path: Path, flags: list[str]) -> None:
    """Run the decoder on 450,000 damaged images, in a process of its own, with sanitizers watching."""
    program = watched_build("fuzz_jpeg.c", "*.c", flags, tmp_path)
    for number, form in enumerate(FORMS):
        (tmp_path / f"{number}.jpg").write_bytes(encode(rough(77, 101, seed=number), **form))
    images = [str(path) for path in sorted(tmp_path.glob("*.jpg"))]
    done = subprocess.run([program, "50000", "1", *images], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 10_000


def test_a_run_says_why_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.data.decoding import jpeg

    monkeypatch.setattr(jpeg, "jpeg_decoder", lambda: None)
    monkeypatch.setattr(jpeg, "decode_library", lambda: (None, "there is no library"))
    (line,) = jpeg.describe_slower()
    assert "there is no library" in line


@pytest.mark.slow
def test_without_the_compiled_code_everything_works(tmp_path: Path) -> None:
    """Open a set and read it in a process that does without."""
    from .image_files import write_classes

    write_classes(tmp_path / "set" / "train", {"cat": 3, "dog": 3}, hw=(150, 120))
    write_classes(tmp_path / "set" / "val", {"cat": 1, "dog": 1})
    words = [sys.executable, "-m", "headrace", "data", "bench", "--dataset-path", str(tmp_path / "set"), "--json"]
    words += ["--image-size", "112", "--threads", "2", "--seconds", "0.2", "--parts", "block"]
    environment = dict(os.environ) | {"HEADRACE_NATIVE": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert '"decoder": "simplejpeg"' in done.stdout
