"""Decoding: every format and colour space against Pillow, EXIF turns, scaled decoding, and damaged files."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from headrace.data.decoding import image as image_module
from headrace.data.decoding.crop import CROP_RULES
from headrace.data.decoding.image import BadImage, Header, decode, decode_factor, read_header, readable_extensions
from headrace.data.decoding.image_source import ViewSpec, decode_into
from headrace.data.decoding.resize import Scratch

from .image_files import ObjectSamples, encode, smooth

PIXELS = smooth(40, 60)


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decode JPEGs with each of the two decoders."""
    if request.param == "Pillow":
        monkeypatch.setattr(image_module, "_simplejpeg", lambda: None)
    assert image_module.decoder_name() == request.param
    return request.param


def opened(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def read(data: bytes, channels: int = 3, factor: int = 1) -> np.ndarray:
    return decode(data, read_header(data), channels, factor)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_is_what_pillow_decodes(decoder: str, subsampling: int, progressive: bool) -> None:
    data = encode(PIXELS, subsampling=subsampling, progressive=progressive)
    header = read_header(data)
    assert (header.kind, header.height, header.width) == ("jpeg", 40, 60)
    difference = np.abs(read(data).astype(int) - opened(data))
    assert difference.max() <= 2, "both are libjpeg"


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_formats_are_exact(kind: str) -> None:
    data = encode(PIXELS, kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert (read_header(data).kind, read_header(data).height) == (kind.lower(), 40)
    assert (read(data) == PIXELS).all()


def test_grey_is_repeated_and_colour_is_weighed(decoder: str) -> None:
    grey = PIXELS[:, :, 0]
    for data in (encode(grey), encode(grey, "PNG")):
        rgb = read(data)
        assert rgb.shape == (40, 60, 3)
        assert (rgb[:, :, 0] == rgb[:, :, 1]).all()
        assert np.abs(rgb[:, :, 0].astype(int) - grey).max() < 12
    weighed = PIXELS @ np.array([0.299, 0.587, 0.114])
    assert np.abs(read(encode(PIXELS, "PNG"), 1)[:, :, 0] - weighed).max() <= 1
    assert np.abs(read(encode(PIXELS, quality=100, subsampling=0), 1)[:, :, 0] - weighed).max() <= 4


def test_cmyk_becomes_rgb(decoder: str) -> None:
    file = io.BytesIO()
    cmyk = Image.fromarray(PIXELS).convert("CMYK")
    cmyk.save(file, "JPEG", quality=100, subsampling=0)
    difference = np.abs(read(file.getvalue()).astype(int) - PIXELS)
    assert difference.max() <= 6


def test_other_png_modes() -> None:
    image = Image.fromarray(PIXELS)
    for mode in ("P", "RGBA", "LA", "1"):
        file = io.BytesIO()
        image.convert(mode).save(file, "PNG")
        want = np.asarray(
            image.convert(mode).convert("RGBA").convert("RGB") if mode == "P" else image.convert(mode).convert("RGB")
        )
        assert (read(file.getvalue()) == want).all(), mode
    deep = (PIXELS[:, :, 0].astype(np.uint16) << 8) + 77
    assert (read(encode(deep, "PNG"))[:, :, 0] == PIXELS[:, :, 0]).all(), "16 bits keep their high byte"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_honoured(decoder: str, orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exact = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    data = encode(PIXELS, kind, exif=exif.tobytes(), **exact)
    want = opened(data)
    header = read_header(data)
    assert (header.height, header.width) == want.shape[:2] == ((40, 60) if orientation < 5 else (60, 40))
    assert np.abs(read(data).astype(int) - want).max() <= 2


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize(("height", "width"), [(160, 224), (163, 229)])
def test_scaled_decoding_is_near_the_mean_of_the_pixels(decoder: str, factor: int, height: int, width: int) -> None:
    pixels = smooth(height, width, seed=3)
    small = read(encode(pixels, subsampling=0), factor=factor)
    assert small.shape == (-(-height // factor), -(-width // factor), 3)
    whole = pixels[: height // factor * factor, : width // factor * factor].astype(float)
    means = whole.reshape(height // factor, factor, width // factor, factor, 3).mean((1, 3))
    difference = np.abs(small[: means.shape[0], : means.shape[1]] - means)
    assert difference.max() < 12
    assert difference.mean() < 1.5


def test_the_factor_leaves_enough_pixels() -> None:
    jpeg = Header(kind="jpeg", height=4000, width=4000)
    for crop, wanted, factor in [
        ((447, 448), (224, 224), 1),
        ((448, 448), (224, 224), 2),
        ((900, 2000), (224, 224), 4),
        ((4000, 4000), (224, 224), 8),
        ((1000, 2000), (256, 512), 2),
    ]:
        assert decode_factor(jpeg, crop, wanted) == factor
    assert decode_factor(Header(kind="png", height=4000, width=4000), (4000, 4000), (224, 224)) == 1


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the file cut short, with bytes changed, or with a piece missing or doubled."""
    place, length = rng.randrange(len(data)), rng.randrange(1, 200)
    match rng.randrange(4):
        case 0:
            return data[:place]
        case 1:
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 8)):
                changed[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(changed)
        case 2:
            return data[:place] + data[place + length :]
        case _:
            return data[:place] + data[place : place + length] + data[place:]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_files_are_refused_or_decode_to_pixels_of_their_size(decoder: str, kind: str) -> None:
    rng = random.Random(kind)
    data = encode(PIXELS, kind)
    refused = 0
    for _ in range(150):
        try:
            bad = damaged(data, rng)
            header = read_header(bad)
            pixels = decode(bad, header)
        except BadImage:
            refused += 1
        else:
            assert pixels.dtype == np.uint8
            assert pixels.shape == (header.height, header.width, 3)
    assert refused > 50


def test_a_jpeg_that_ends_early_is_never_taken(decoder: str) -> None:
    data = encode(PIXELS)
    for length in range(0, len(data) - 2, 37):
        with pytest.raises(BadImage):
            read(data[:length])


def test_what_is_no_image_is_named() -> None:
    for data, words in [(b"", "empty"), (b"%PDF-1.4" + bytes(30), "not an image"), (b"hello", "not an image")]:
        with pytest.raises(BadImage, match=words):
            read_header(data)


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side: int) -> None:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    with pytest.raises(BadImage, match="decompression bomb"):
        read_header(png)


def test_a_jpeg_bomb_is_refused_too() -> None:
    data = bytearray(encode(PIXELS))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(BadImage, match="60,000 x 60,000 pixels, more than 89,478,485"):
        read_header(bytes(data))


@pytest.mark.parametrize(
    ("kind", "extension"),
    [("BMP", ".bmp"), ("GIF", ".gif"), ("TIFF", ".tiff"), ("AVIF", ".avif"), ("PPM", ".ppm"), ("JPEG2000", ".jp2")],
)
def test_other_types_are_read_by_pillow(kind: str, extension: str) -> None:
    if extension not in readable_extensions():
        pytest.skip(f"Pillow was built without {kind}")
    data = encode(PIXELS, kind)
    header = read_header(data)
    assert (header.kind, header.height, header.width) == ("other", *PIXELS.shape[:2])
    error = np.abs(decode(data, header).astype(int) - PIXELS)
    assert error.mean() < (0.01 if kind in ("BMP", "TIFF", "PPM") else 8), "lossless, or close to it"
    with pytest.raises(BadImage):
        read(data[: len(data) // 2])


def test_the_first_frame_of_a_gif_is_read() -> None:
    frames = [Image.fromarray(np.full((8, 9, 3), level, np.uint8)) for level in (10, 200)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert read(file.getvalue()).tolist() == np.full((8, 9, 3), 10).tolist()


def test_a_turned_tiff_is_upright() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    Image.fromarray(PIXELS).save(file, "TIFF", exif=exif)
    assert np.array_equal(read(file.getvalue()), np.rot90(PIXELS, -1))


@pytest.mark.parametrize(("mode", "value"), [("F", 0.5), ("I", 70_000)])
def test_pixels_of_an_unknown_range_are_refused(mode: str, value: float) -> None:
    file = io.BytesIO()
    Image.new(mode, (4, 4), value).save(file, "TIFF")
    with pytest.raises(BadImage, match="range is not known"):
        read(file.getvalue())


def test_heic_names_its_plugin_or_is_read() -> None:
    data = b"\0\0\0\x18ftypheic" + bytes(40)
    with pytest.raises(BadImage, match="." if ".heic" in readable_extensions() else "pip install pillow-heif"):
        read_header(data)
    heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    heif.from_pillow(Image.fromarray(PIXELS)).save(file, quality=90)
    assert np.abs(read(file.getvalue()).astype(int) - PIXELS).mean() < 5


def odd_jpeg(factors: tuple[int, ...] = (0x22, 0x12, 0x21), units: int = 3) -> bytes:
    """Return a valid JPEG whose colours are subsampled as no fast decoder knows (`cjpeg -sample 2x2,1x2,2x1`).

    Its header is Pillow's with other factors; its blocks have a mean and nothing else, in the standard Huffman codes.
    """
    data = bytearray(encode(np.zeros((16, 16, 3), np.uint8), quality=90, subsampling=0))
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    struct.pack_into(">HH", data, frame + 5, 16, 16 * units)
    for part, factor in enumerate(factors):
        data[frame + 11 + 3 * part] = factor
    means = (("00", "010", "011", "100", "101", "110"), ("00", "01", "10", "110", "1110", "11110"))
    ends, rng, bits = ("1010", "00"), np.random.default_rng(1), ""
    for part in [part for _ in range(units) for part, f in enumerate(factors) for _ in range((f >> 4) * (f & 15))]:
        value, table = int(rng.integers(-20, 21)), min(part, 1)
        size = abs(value).bit_length()
        digits = format(value if value > 0 else value + (1 << size) - 1, f"0{size}b") if size else ""
        bits += means[table][size] + digits + ends[table]
    bits += "1" * (-len(bits) % 8)
    packed = bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)).replace(b"\xff", b"\xff\0")
    return bytes(data[: scan + 2 + struct.unpack_from(">H", data, scan + 2)[0]]) + packed + b"\xff\xd9"


def test_a_jpeg_that_fast_decoders_refuse_is_read_by_pillow(decoder: str) -> None:
    data = odd_jpeg()
    if decoder == "simplejpeg":
        with pytest.raises(ValueError, match="subsampling"):
            image_module._simplejpeg().decode_jpeg_header(data, strict=False)
    assert (read(data) == opened(data)).all()
    assert opened(data).std() > 5
    out = np.empty((8, 8, 3), np.uint8)
    decode_into(
        ObjectSamples([(data, 0)]), 0, 0, ViewSpec(size=8, crop=CROP_RULES["torchvision"], seed=1), out, Scratch()
    )
    with pytest.raises(BadImage):
        read(data[: len(data) - 20])
