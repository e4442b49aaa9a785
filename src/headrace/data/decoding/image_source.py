"""A source that decodes: encoded samples become views of one size.

A sample's view depends on (seed, epoch, sample) alone. A broken image is replaced by the next good sample of its
class, whichever thread finds it. It keeps its position in the order, so that all other samples stay where they are.
"""

from dataclasses import dataclass

import numpy as np

from headrace.core.errors import DataError
from headrace.data.decoding.batch_decoder import FileBackedSamples, batch_decoder
from headrace.data.decoding.crop import CropRule, draws, random_crop, valid_view
from headrace.data.decoding.image import (
    BadImage,
    Header,
    decode_factor,
    decode_stored,
    is_sideways,
    read_header,
    stored_view,
    turn,
)
from headrace.data.decoding.jpeg import jpeg_decoder
from headrace.data.decoding.jpeg_rows import cut_rows
from headrace.data.decoding.limits import MAX_PIXELS
from headrace.data.decoding.resize import Resampling, Scratch, View, resize_view
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.samples import Boxes, Samples
from headrace.data.sets.source import Source


@dataclass(frozen=True, kw_only=True)
class ViewSpec:
    """How an image becomes the network's input: size, channels and crop."""

    size: int
    channels: int = 3
    crop: CropRule | None = None  # None: as in evaluation
    seed: int = 0
    shorter_side: int | None = None  # of a resized image in evaluation; None: size * 256 / 224
    antialias: bool = True
    bicubic: bool = False  # in evaluation
    whole: bool = False  # the whole image becomes a square, whatever its shape
    # Whether JPEGs that are at least twice as large as needed may be decoded at 1/2, 1/4 or 1/8 in a view of
    # evaluation. Its pixels are otherwise Pillow's, those of a full decode and then `resize`, bit for bit.
    reduced: bool = False

    @property
    def is_quick(self) -> bool:
        """Say whether this is a view of training alone, whose pixels may be a few levels off if that saves time."""
        return self.crop is not None or self.whole

    @property
    def is_compiled(self) -> bool:
        """Say whether the compiled decoder may be used."""
        return self.is_quick and self.antialias

    def factor(self, header: Header, view: View) -> int:
        """Return at which fraction of its size an image is decoded for a view of it: 1/2, 1/4 or 1/8, else 1."""
        return decode_factor(header, view.crop[2:], view.resized_hw) if self.is_quick or self.reduced else 1

    def resampling(self, orientation: int = 1) -> Resampling:
        """Return how the view of an image stored in this orientation is resized: random crops are bilinear."""
        first = "quick" if self.is_quick else "down" if is_sideways(orientation) else "across"
        return Resampling(self.antialias, self.bicubic and not self.is_quick, first)

    def view(self, hw: tuple[int, int], epoch: int, sample: int, boxes: Boxes = ()) -> View:
        """Return the view of an image of this size."""
        if self.whole:
            return View((0, 0, *hw), (self.size, self.size))
        if self.crop is None:
            return valid_view(hw, self.size, self.shorter_side)
        crop = random_crop(hw, self.crop, draws(self.seed, epoch, sample), boxes)
        return View(crop, (self.size, self.size))


def decoded_source(samples: Samples, view: ViewSpec, split: str, bad: BadSamples) -> Source:
    """Return one split of images, decoded as they are read; broken ones are added to `bad`."""
    decoder = _Decoder(samples, view, split, bad)
    return Source(
        labels=samples.labels,
        image_hwc=(view.size, view.size, view.channels),
        num_distinct=len(samples),
        read_into=decoder.read_into,
        slow=True,
        name=samples.name,
        samples=samples,
        original_hw=decoder.original_hw,
    )


class _Decoder:
    """Decodes samples of one split, and remembers the original sizes of their images."""

    def __init__(self, samples: Samples, spec: ViewSpec, split: str, bad: BadSamples) -> None:
        self._samples, self._spec, self._split, self._bad = samples, spec, split, bad
        self._scratch = Scratch()
        self.original_hw = np.zeros((len(samples), 2), np.int32)
        jpeg_decoder()  # loaded and checked here, before the threads would all do so at once

    def read_into(self, indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
        """Write the images of these samples into `out`."""
        epochs = np.broadcast_to(np.asarray(epoch), indices.shape)
        decoded = self._decode_together(indices, epochs, out)
        for place, (sample, when) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
            if decoded is None or not decoded[place]:
                self._decode(sample, when, out[place])

    def _decode_together(self, indices: np.ndarray, epochs: np.ndarray, out: np.ndarray) -> np.ndarray | None:
        """Decode what one call in C can decode; return which ones those are, None without the compiled decoder."""
        spec = self._spec
        if not spec.is_compiled or not out.flags.c_contiguous:
            return None
        decoder = batch_decoder(spec.crop, spec.seed, spec.size, spec.channels)
        if decoder is None or not isinstance(self._samples, FileBackedSamples):
            return None
        decoded, hw = decoder.decode_into(self._samples.extents(indices), indices, epochs, out)
        self.original_hw[indices[decoded]] = hw[decoded]
        return decoded

    def _decode(self, sample: int, epoch: int, out: np.ndarray) -> None:
        try:
            self.original_hw[sample] = decode_into(self._samples, sample, epoch, self._spec, out, self._scratch)
        except BadImage as error:
            self._bad.add(self._split, sample, self._samples.name(sample), str(error))
            self._decode_next_of_class(sample, epoch, out)

    def _decode_next_of_class(self, sample: int, epoch: int, out: np.ndarray) -> None:
        """Decode the next good sample of the class instead, trying each other sample at most once.

        Where a label is a number for each output, it is the one whose label is nearest.
        """
        labels = self._samples.labels
        if labels.ndim > 1:
            far = np.square(labels.astype(np.float64) - labels[sample]).sum(1)
            after = np.argsort(far, kind="stable")
            after = after[after != sample]
        else:
            same = np.flatnonzero(labels == labels[sample])
            after = np.roll(same, -int(np.searchsorted(same, sample)))[1:]
        for other in after.tolist():
            try:
                self.original_hw[sample] = decode_into(self._samples, other, epoch, self._spec, out, self._scratch)
                return
            except BadImage as error:
                self._bad.add(self._split, other, self._samples.name(other), str(error))
        which = f" of class {int(labels[sample])}" if labels.ndim == 1 else ""
        raise DataError(
            f"No sample{which} in {self._split} can be read, {self._samples.name(sample)} included.",
            remedy="`headrace data verify` says what is wrong with each.",
        )


def decode_into(
    samples: Samples, sample: int, epoch: int, spec: ViewSpec, out: np.ndarray, scratch: Scratch | None
) -> tuple[int, int]:
    """Decode one sample, write its view into `out` and return its height and width; BadImage says what is wrong."""
    data, boxes = samples.content(sample)
    if isinstance(data, np.ndarray):
        view = spec.view(data.shape[:2], epoch, sample, boxes)
        resize_view(_as_channels(data, spec.channels), view, out, spec.resampling())
        return data.shape[:2]
    decoder = jpeg_decoder() if spec.is_compiled else None
    known = decoder.header(data) if decoder is not None else None
    header = known or read_header(data)
    view = stored_view(spec.view((header.height, header.width), epoch, sample, boxes), header, out.shape[:2])
    stored = out if header.orientation == 1 else np.empty_like(out)  # views are square
    if decoder is None or known is None or not decoder.decode_into(data, view, stored, spec.factor(header, view)):
        pixels, view = decode_view(data, header, view, spec, scratch)
        resize_view(pixels, view, stored, spec.resampling(header.orientation))
    if stored is not out:
        out[...] = turn(stored, header.orientation)
    return header.height, header.width


def decode_view(
    data: bytes, header: Header, view: View, spec: ViewSpec, scratch: Scratch | None = None
) -> tuple[np.ndarray, View]:
    """Decode what a view of the stored image needs: at a fraction of the size, or only its rows.

    Return the pixels and the view in them.
    """
    if view.resized_hw[0] * view.resized_hw[1] > MAX_PIXELS:
        raise BadImage(f"{header.width:,} x {header.height:,} pixels: too narrow for a centre crop")
    top, left, height, width = view.crop
    factor, quick = spec.factor(header, view), spec.is_quick
    if quick and factor == 1 and header.kind == "jpeg" and header.plain:
        cut = cut_rows(data, int(top), int(top + height))
        if cut is not None:
            pixels = decode_stored(cut[0], read_header(cut[0]), spec.channels, quick=True, scratch=scratch)
            return pixels, view._replace(crop=(top - cut[1], left, height, width))
    pixels = decode_stored(data, header, spec.channels, factor, quick, scratch)
    return pixels, view._replace(crop=(top / factor, left / factor, height / factor, width / factor))


def _as_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Return pixels with as many channels: grey repeated, colour converted as in Pillow, alpha dropped."""
    given = pixels.shape[2]
    if given == channels or (given == 4 and channels == 3):
        return pixels[:, :, :channels]
    if channels == 3:
        return np.repeat(pixels[:, :, :1], 3, axis=2)
    weights = np.array([19595, 38470, 7471])
    return ((pixels[:, :, :3].astype(np.int64) @ weights + 0x8000) >> 16).astype(np.uint8)[:, :, None]
