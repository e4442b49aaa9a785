"""Decode one image: the bytes of a JPEG or of any file that Pillow reads to RGB or grey pixels, rotated as EXIF says.

JPEGs go through simplejpeg (libjpeg-turbo, which releases the interpreter lock), strictly: data that libjpeg would only
warn about (truncated or inconsistent) is refused, since its pixels would be wrong. Pillow decodes the rest, and JPEGs
too where simplejpeg is not installed. Both can decode a JPEG at 1/2, 1/4 or 1/8 of its size for less work.
"""

import io
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.data.decoding.limits import (
    BadImage,
    MeteredFile,
    refuse_hidden_parts,
    refuse_many_pixels,
    refuse_many_scans,
    segments,
)
from headrace.data.decoding.resize import Scratch, View

if TYPE_CHECKING:
    from PIL import Image


_MAX_JPEG_SIDE = 65_500  # libjpeg's limit
# Pillow's formats and the names of their files. EPS is not among them, because Pillow runs Ghostscript for it, nor
# are formats that are no images (MPEG, HDF5). TGA comes last: it has no signature, so any bytes are tried.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "BMP": (".bmp", ".dib"),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif", ".hif"),
    "JPEG2000": (".jp2", ".j2k", ".jpx", ".jpf", ".j2c", ".jpc"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "QOI": (".qoi",),
    "ICO": (".ico",),
    "PCX": (".pcx",),
    "PSD": (".psd",),
    "SGI": (".sgi", ".rgb", ".rgba", ".bw"),
    "SUN": (".ras",),
    "DDS": (".dds",),
    "TGA": (".tga",),
}
EXTENSIONS = tuple(extension for names in FORMATS.values() for extension in names)
FORMATS_TEXT = "JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, HEIC, JPEG 2000, PPM and others that Pillow reads"
_PLUGINS = {"HEIF": "pip install pillow-heif", "AVIF": "pip install 'pillow>=11.3'"}
# By which JPEG decoders can reduce an image while decoding it, most first: they transform fewer coefficients.
FACTORS = (8, 4, 2)
_SIDEWAYS = 5  # from this EXIF orientation on, rows and columns are swapped
# EXIF's orientations but 1, upright: whether columns and rows are mirrored, and whether they are swapped.
_TURNS = {2: (1, 0, 0), 3: (1, 1, 0), 4: (0, 1, 0), 5: (0, 0, 1), 6: (1, 0, 1), 7: (1, 1, 1), 8: (0, 1, 1)}


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts in an image's header. Height and width are those of the rotated image."""

    kind: str  # jpeg | png | webp | other
    height: int
    width: int
    orientation: int = 1  # as EXIF counts
    plain: bool = True  # a JPEG of grey or YCbCr, which simplejpeg decodes


@lru_cache(maxsize=1)  # searching for a missing module takes longer than reading a header
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def decoder_name() -> str:
    """Return the name of the library that decodes JPEGs."""
    return "simplejpeg" if _simplejpeg() else "Pillow"


@lru_cache(maxsize=1)
def _pillow() -> tuple[Any, tuple[str, ...]]:
    """Return Pillow's module and the formats that it can read here."""
    from PIL import Image, features

    try:
        import pillow_heif  # pyright: ignore[reportMissingImports]

        pillow_heif.register_heif_opener()
    except ImportError:
        pass
    Image.init()
    # Pillow registers AVIF even where it was built without the library that decodes it.
    usable = set(Image.OPEN) - (set() if features.check("avif") else {"AVIF"})
    return Image, tuple(name for name in FORMATS if name in usable)


@lru_cache(maxsize=1)
def readable_extensions() -> tuple[str, ...]:
    """Return the extensions of the formats that can be read here: AVIF and HEIC depend on what is installed."""
    return tuple(extension for name in _pillow()[1] for extension in FORMATS[name])


def how_to_read(extension: str) -> str:
    """Return what to install so that files with this extension can be read; empty for what no package reads."""
    return next((_PLUGINS.get(name, "") for name, known in FORMATS.items() if extension in known), "")


def kind_of(data: bytes) -> str:
    """Return jpeg, png or webp by the first bytes, or other."""
    if data[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else "other"


def read_header(data: bytes) -> Header:
    """Return an image's size without decoding it; BadImage says what is wrong."""
    if not data:
        raise BadImage("empty")
    kind, turbo = kind_of(data), _simplejpeg()
    if kind == "jpeg" and turbo is not None:
        try:
            # Not strict: the header of a truncated file is still right, and decoding will say what is missing.
            height, width, colours, _ = turbo.decode_jpeg_header(data, strict=False)
            return header_of(kind, (height, width), _jpeg_orientation(data), colours in ("YCbCr", "Gray"))
        except (ValueError, KeyError):  # damaged, or valid but of a subsampling that only Pillow reads
            pass
    try:
        with _opened(MeteredFile(data)) as image:
            # TGA has no signature, so that Pillow tries it with any bytes.
            if kind == "jpeg" and image.format not in ("JPEG", "MPO"):
                raise BadImage("a damaged JPEG image")  # whose bytes another format takes for its own
            width, height = image.size
            exif = bytes(image.info.get("exif") or b"")  # getexif() would decode a whole PNG
            plain = turbo is None and image.mode in ("RGB", "L")
    except BadImage:
        raise
    except Exception as error:  # decoders raise many types: ValueError, OSError, SyntaxError, struct.error ...
        raise BadImage(_words(error)) from None
    return header_of(kind, (height, width), _tiff_orientation(exif.removeprefix(b"Exif\0\0")), plain)


def header_of(kind: str, hw: tuple[int, int], orientation: int, plain: bool = True) -> Header:
    """Return the header of an image of this stored size; one that is too large is a BadImage."""
    height, width = hw
    refuse_many_pixels(height, width)
    if height < 1 or width < 1:
        raise BadImage("no pixels")
    orientation = orientation if orientation in _TURNS else 1
    if is_sideways(orientation):
        height, width = width, height
    return Header(kind=kind, height=height, width=width, orientation=orientation, plain=plain)


def decode(data: bytes, header: Header, channels: int = 3, factor: int = 1, quick: bool = False) -> np.ndarray:
    """Return the upright pixels, uint8 [h, w, channels]; a JPEG comes at ceil(size / factor), others at full size.

    With a factor above 1 the last row and column may be parts of pixels; turned, they may be the first.
    """
    return turn(decode_stored(data, header, channels, factor, quick), header.orientation)


def decode_stored(
    data: bytes, header: Header, channels: int, factor: int = 1, quick: bool = False, scratch: Scratch | None = None
) -> np.ndarray:
    """Return the pixels as they are stored, not turned.

    `quick` lets simplejpeg use the faster transform and repeat colours instead of interpolating them, as is usual for
    training: values differ by a few levels. With `scratch` the pixels may be in that buffer, valid until its next use.
    """
    turbo = _simplejpeg()
    if header.kind == "jpeg":  # here, where both libraries are called, since C code reads headers too
        refuse_many_scans(data, header.height * header.width)
    try:
        if header.kind == "jpeg" and header.plain and turbo is not None:
            pixels = _turbo_pixels(turbo, data, header, (channels, factor, quick), scratch)
        else:
            pixels = _pillow_pixels(data, header, channels, factor)
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(_words(error)) from None
    return pixels


def encode_jpeg(image: "Image.Image", quality: int, rows_between_markers: int = 0) -> bytes:
    """Return one of Pillow's images as a JPEG, with a restart marker after so many rows of blocks."""
    if max(image.size) > _MAX_JPEG_SIDE:
        raise BadImage(f"{image.width:,} x {image.height:,} pixels: a side of a JPEG has at most {_MAX_JPEG_SIDE:,}")
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, restart_marker_rows=rows_between_markers)
    return file.getvalue()


def decode_factor(header: Header, crop_hw: tuple[float, float], wanted_hw: tuple[int, int]) -> int:
    """Return by how much a JPEG can be shrunk while decoding so that the crop is still no smaller than wanted."""
    if header.kind != "jpeg":
        return 1
    least = min(side / wanted for side, wanted in zip(crop_hw, wanted_hw, strict=True))
    # Never below the wanted size: enlarging what was decoded too small would blur it.
    return next((factor for factor in FACTORS if least >= factor), 1)


def _turbo_pixels(
    turbo: Any, data: bytes, header: Header, options: tuple[int, int, bool], scratch: Scratch | None
) -> np.ndarray:
    channels, factor, quick = options
    height, width = -(-header.height // factor), -(-header.width // factor)
    if is_sideways(header.orientation):
        height, width = width, height
    pixels = turbo.decode_jpeg(
        data,
        "RGB" if channels == 3 else "GRAY",
        min_height=height,
        min_width=width,
        min_factor=factor,
        fastdct=quick,
        fastupsample=quick,
        buffer=scratch.take(height * width * channels) if scratch else None,
    )
    return pixels.reshape(height, width, channels)


def _pillow_pixels(data: bytes, header: Header, channels: int, factor: int) -> np.ndarray:
    file = MeteredFile(data)
    with _opened(file) as image:
        file.allow_loops(_pillow()[0].DECODERS, image)
        if header.kind == "jpeg" and factor > 1:
            # Only a request: libjpeg decodes at the nearest size that is not smaller.
            image.draft(None, (image.width // factor, image.height // factor))
        image.load()
        return pillow_pixels(image, channels)


def pillow_pixels(image: "Image.Image", channels: int) -> np.ndarray:
    """Return the pixels of a loaded image, uint8 [h, w, channels]."""
    mode = "RGB" if channels == 3 else "L"
    # TIFFs may hold measurements; scaled by a guess they would be wrong pixels without a word.
    if image.mode == "F":
        raise BadImage("pixels are floating-point numbers, whose range is not known")
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's conversion would clip everything above 255
        values = np.asarray(image).astype(np.int64)
        if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise BadImage("pixels are numbers of 32 bits, whose range is not known")
        grey = (values >> 8 if values.max(initial=0) > 255 else values).astype(np.uint8)
        pixels = np.repeat(grey[:, :, None], channels, axis=2)
    else:
        # Through RGBA, because a palette may have transparent colours.
        plain = image.convert("RGBA") if image.mode in ("P", "PA") else image
        pixels = np.asarray(plain if plain.mode == mode else plain.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _opened(file: MeteredFile) -> Any:
    from PIL import UnidentifiedImageError

    pillow, formats = _pillow()
    data = file.getvalue()  # no copy
    refuse_hidden_parts(data)
    try:
        return pillow.open(file, formats=formats)
    except UnidentifiedImageError:
        kind = kind_of(data)
        if data[4:8] == b"ftyp" and data[8:12] in (b"heic", b"heix", b"heim", b"heis", b"mif1"):
            raise BadImage(f"a HEIC image; to read it: {_PLUGINS['HEIF']}") from None
        raise BadImage("not an image" if kind == "other" else f"a damaged {kind.upper()} image") from None


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return stored pixels upright."""
    if orientation == 1:
        return pixels
    mirror_columns, mirror_rows, sideways = _TURNS[orientation]
    if sideways:
        pixels = pixels.transpose(1, 0, 2)
    return np.ascontiguousarray(pixels[:: -1 if mirror_rows else 1, :: -1 if mirror_columns else 1])


def is_sideways(orientation: int) -> bool:
    """Say whether an image of this EXIF orientation is stored with rows and columns swapped."""
    return orientation >= _SIDEWAYS


def stored_view(view: View, header: Header, out_hw: tuple[int, int]) -> View:
    """Return a view of the upright image as one of the stored image; `turn` makes its pixels upright.

    Turning the finished view is cheaper than turning the image. It is also exact: a JPEG decoded at 1/2 ends with part
    of a pixel, and in an image that was turned first the others would be shifted by that part.
    """
    if header.orientation == 1:
        return view
    mirror_columns, mirror_rows, sideways = _TURNS[header.orientation]
    (top, left, height, width), resized, offset = view.crop, view.resized_hw, view.offset
    if mirror_rows:
        top, offset = header.height - top - height, (resized[0] - offset[0] - out_hw[0], offset[1])
    if mirror_columns:
        left, offset = header.width - left - width, (offset[0], resized[1] - offset[1] - out_hw[1])
    if sideways:
        return View((left, top, width, height), (resized[1], resized[0]), (offset[1], offset[0]))
    return View((top, left, height, width), resized, offset)


def _jpeg_orientation(data: bytes) -> int:
    """Return the orientation in a JPEG's EXIF segment, 1 where there is none; reads the segments before it."""
    # Photographs have thumbnails and colour profiles before the scan, which are skipped by their length.
    for marker, place, length in segments(data):
        if marker == 0xE1 and data[place + 4 : place + 10] == b"Exif\0\0":
            return _tiff_orientation(data[place + 10 : place + 2 + length])
    return 1


def _tiff_orientation(block: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None or len(block) < 8:
        return 1
    try:
        first = struct.unpack_from(order + "I", block, 4)[0]
        for entry in range(struct.unpack_from(order + "H", block, first)[0]):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", block, first + 2 + 12 * entry)
            if tag == 0x0112 and kind == 3:
                return value
    except struct.error:  # a damaged EXIF block does not affect the image
        pass
    return 1


def _words(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).rstrip(".")
