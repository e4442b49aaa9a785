"""Operations on the colours of images: one definition, run by NumPy on the host or by JAX on the device.

Images are float32 [n, H, W, C] with whole numbers from 0 to 255, before and after each operation, as if they were
bytes; `strength` is one number or [n, 1, 1, 1]. The meaning is Pillow's (ImageEnhance, ImageOps), to one level of
255.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from headrace.core.rng import HostOrDevice, Seed, array_module, draw, name_id

Array = HostOrDevice
Epoch = Array | np.integer | int
Strength = Array | np.float32 | float
TOP = np.float32(255)


def exact(strength: np.ndarray | float) -> np.ndarray:
    """Return the nearest multiple of 1/4096: such a factor times a level is exact in float32 on host and device."""
    return (np.rint(np.asarray(strength, np.float64) * 4096) / 4096).astype(np.float32)


def levels(x: Array) -> Array:
    """Return the nearest whole numbers from 0 to 255."""
    xp = array_module(x)
    return xp.clip(xp.round(x), np.float32(0), TOP)


def grey(x: Array) -> Array:
    """Return the brightness of each pixel, [n, H, W, 1]: Rec. 601 for RGB, else the mean of the channels."""
    xp = array_module(x)
    if x.shape[3] != 3:
        return levels(x.mean(3, keepdims=True, dtype=np.float32))
    red, green, blue = x[..., 0:1], x[..., 1:2], x[..., 2:3]
    # whole numbers below 2^24: exact in float32
    total = np.float32(19595) * red + np.float32(38470) * green + np.float32(7471) * blue + np.float32(32768)
    return xp.floor(total / np.float32(65536))


def brightness(x: Array, strength: Strength) -> Array:
    """Multiply: 0 is black, 1 changes nothing."""
    return levels(strength * x)


def contrast(x: Array, strength: Strength) -> Array:
    """Move away from the image's mean brightness, or (below 1) towards it."""
    xp = array_module(x)
    # Rounded as Pillow does: the mean is a whole level.
    middle = xp.floor(grey(x).mean((1, 2, 3), keepdims=True, dtype=np.float32) + np.float32(0.5))
    return _away_from(middle, x, strength)


def saturation(x: Array, strength: Strength) -> Array:
    """Move away from grey: 0 is a grey image, 1 changes nothing."""
    return _away_from(grey(x), x, strength)


def sharpness(x: Array, strength: Strength) -> Array:
    """Move away from the image smoothed over 3 x 3 pixels; the border stays."""
    xp = array_module(x)
    if min(x.shape[1:3]) < 3:
        return x
    three = x[:, :-2] + x[:, 1:-1] + x[:, 2:]
    nine = three[:, :, :-2] + three[:, :, 1:-1] + three[:, :, 2:]
    # Pillow's SMOOTH kernel: ones around a five, divided by 13.
    smooth = levels((nine + np.float32(4) * x[:, 1:-1, 1:-1]) / np.float32(13))
    inner = _away_from(smooth, x[:, 1:-1, 1:-1], strength)
    at_border = np.ones((1, *x.shape[1:3], 1), bool)
    at_border[:, 1:-1, 1:-1] = False
    return xp.where(at_border, x, xp.pad(inner, ((0, 0), (1, 1), (1, 1), (0, 0))))


def posterize(x: Array, strength: Strength) -> Array:
    """Round down to multiples of `strength`."""
    return array_module(x).floor(x / strength) * strength


def solarize(x: Array, strength: Strength) -> Array:
    """Invert values that are not below `strength`."""
    return array_module(x).where(x >= strength, TOP - x, x)


def invert(x: Array, strength: object = None) -> Array:
    return TOP - x


def autocontrast(x: Array, strength: object = None) -> Array:
    """Stretch each channel so that its darkest value is 0 and its brightest 255."""
    xp = array_module(x)
    low, high = x.min((1, 2), keepdims=True), x.max((1, 2), keepdims=True)
    scale = TOP / xp.maximum(high - low, np.float32(1))
    return xp.where(high > low, levels((x - low) * scale), x)


def equalize(x: Array, strength: object = None) -> Array:
    """Spread each channel so that all values become about equally frequent."""
    xp = array_module(x)
    counts = _histogram(x)  # int32 [n, C, 256]
    level = xp.arange(256, dtype=np.int32)[None, None, :]
    greatest = xp.where(counts > 0, level, 0).max(2, keepdims=True)
    at_greatest = xp.where(level == greatest, counts, 0).sum(2, keepdims=True)
    # As in Pillow's equalize, which leaves the brightest level out of the count.
    step = (x.shape[1] * x.shape[2] - at_greatest) // 255
    below = xp.cumsum(counts, 2) - counts
    table = xp.where(step > 0, xp.minimum((step // 2 + below) // xp.maximum(step, 1), 255), level).astype(np.int32)
    flat = xp.moveaxis(x.reshape(len(x), -1, x.shape[3]), 1, 2).astype(np.int32)
    found = xp.take_along_axis(table, flat, 2).astype(np.float32)
    return xp.moveaxis(found, 1, 2).reshape(x.shape)


def grayscale(x: Array, strength: object = None) -> Array:
    """Replace the colours by the brightness."""
    return array_module(x).broadcast_to(grey(x), x.shape)


_BLUR_RADIUS = 6  # pixels: three deviations of the widest blur


def blur_weights(deviation: float) -> np.ndarray:
    """Return the weights of a pixel and of those 1 to 6 beside it, float32 [7]: a normal curve.

    Multiples of 1/4096, so that sums of them times levels are exact.
    """
    side = np.exp(-0.5 * (np.arange(1, _BLUR_RADIUS + 1) / deviation) ** 2)
    side = np.rint(4096 * side / (1 + 2 * side.sum())) / 4096
    return np.array([1 - 2 * side.sum(), *side], np.float32)


def blur(x: Array, strength: Array) -> Array:
    """Blur down and then across by `blur_weights`, [.., 7] for each image; the border goes on outside."""
    xp = array_module(x)
    radius = _BLUR_RADIUS
    for axis in (1, 2):
        size = x.shape[axis]
        wide = xp.pad(x, [(radius, radius) if each == axis else (0, 0) for each in range(4)], mode="edge")
        total = strength[..., :1] * x
        for far in range(1, radius + 1):
            before, after = (
                wide[:, at : at + size] if axis == 1 else wide[:, :, at : at + size]
                for at in (radius - far, radius + far)
            )
            total = total + strength[..., far : far + 1] * (before + after)
        x = levels(total)
    return x


def turn_hue(x: Array, strength: Strength) -> Array:
    """Rotate the hue by a fraction of the colour circle, in HSV; for 3 channels."""
    xp = array_module(x)
    red, green, blue = x[..., 0:1], x[..., 1:2], x[..., 2:3]
    value = xp.maximum(xp.maximum(red, green), blue)
    spread = value - xp.minimum(xp.minimum(red, green), blue)
    safe = xp.maximum(spread, np.float32(1))
    sixth = xp.where(
        value == red,
        (green - blue) / safe,
        xp.where(value == green, (blue - red) / safe + np.float32(2), (red - green) / safe + np.float32(4)),
    )
    sixth = sixth + np.float32(6) * strength

    def channel(offset: int) -> Array:
        k = (sixth + np.float32(offset)) % np.float32(6)
        return value - spread * xp.clip(xp.minimum(k, np.float32(4) - k), np.float32(0), np.float32(1))

    return levels(xp.concatenate([channel(5), channel(3), channel(1)], 3))


def jitter(x: Array, index: Array, epoch: Epoch, strengths: tuple[float, float], seed: Seed) -> Array:
    """Change brightness, contrast and saturation, in this order, by factors from 1 - s to 1 + s, then rotate the hue.

    `strengths` are s and the largest rotation of the hue; each factor is drawn for each sample.
    """
    strength, turn = strengths

    def drawn(name: str, middle: float, spread: float) -> Array:
        """Draw one of 4,096 evenly spaced values from middle - spread to middle + spread for each sample."""
        table = exact(middle + spread * ((np.arange(4096) + 0.5) / 2048 - 1))
        random_bits = draw(seed, epoch, index, name_id(f"jitter/{name}"))
        return array_module(index).asarray(table)[(random_bits >> np.uint32(20)).astype(np.int32)][:, None, None, None]

    if strength:
        for name, change in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
            x = change(x, drawn(name, 1.0, strength))
    return turn_hue(x, drawn("hue", 0.0, turn)) if turn else x


def sometimes(x: Array, index: Array, epoch: Epoch, fractions: tuple[float, float], seed: Seed) -> Array:
    """Take the colours of a fraction of the images, and blur another by 0.1 to 2 pixels, drawn for each sample."""
    xp = array_module(x)
    to_grey, to_blur = fractions

    def chosen(word: Array, fraction: float) -> Array:
        return ((word >> np.uint32(8)) < np.uint32(round(fraction * 2**24)))[:, None, None, None]

    if to_grey:
        x = xp.where(chosen(draw(seed, epoch, index, name_id("grayscale")), to_grey), grayscale(x), x)
    if to_blur:
        word = draw(seed, epoch, index, name_id("gaussian_blur"))
        table = np.stack([blur_weights(0.1 + 1.9 * at / 63) for at in range(64)])
        weights = xp.asarray(table)[(word & np.uint32(63)).astype(np.int32)][:, None, None, :]
        x = xp.where(chosen(word, to_blur), blur(x, weights), x)
    return x


def _away_from(base: Array, x: Array, strength: Strength) -> Array:
    return levels(base + strength * (x - base))


def _histogram(x: Array) -> Array:
    if isinstance(x, np.ndarray):
        count, channels = x.shape[0], x.shape[3]
        row = np.arange(count)[:, None, None, None] * channels + np.arange(channels)
        place = (row * 256 + x.astype(np.int64)).ravel()
        return np.bincount(place, minlength=count * channels * 256).reshape(count, channels, 256).astype(np.int32)
    return lax.platform_dependent(x, cpu=_histogram_by_adding, default=_histogram_by_comparing)


def _histogram_by_adding(x: Array) -> Array:
    count, _, _, channels = x.shape
    row = (np.arange(count)[:, None, None, None] * channels + np.arange(channels)).astype(np.int32)
    place = (row * 256 + x.astype(np.int32)).reshape(-1)
    # 0.7 ms for 128 images of 32 x 32 on two cores, where comparing takes 44.
    counts = jnp.zeros(count * channels * 256, np.int32).at[place].add(1, mode="promise_in_bounds")
    return counts.reshape(count, channels, 256)


def _histogram_by_comparing(x: Array) -> Array:
    # XLA fuses the comparison with the sum: no scatter, and the [.., 256] comparison is never stored.
    level = jnp.arange(256, dtype=np.float32)[None, None, None, None, :]
    return (x[..., None] == level).sum((1, 2), dtype=np.int32)
