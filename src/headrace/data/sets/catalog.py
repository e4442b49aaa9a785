"""The known datasets: a row for each with its size, classes, published statistics and file layouts."""

from dataclasses import dataclass

from headrace.config.section_data import IMAGE_SIZES

# Class names, in label order


DIGIT_NAMES = tuple("0123456789")

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

CIFAR100_NAMES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip


# The usual ones, with which most published weights were trained.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GREY_MEAN, _GREY_STD = (0.449,), (0.226,)  # weighted means of the three channels


def usual_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ImageNet's mean and standard deviation of pixels, which sets without their own are normalised with."""
    return (_GREY_MEAN, _GREY_STD) if channels == 1 else (IMAGENET_MEAN, IMAGENET_STD)


def numbered_classes(count: int) -> tuple[str, ...]:
    """Return names for classes that nobody has named."""
    return tuple(f"class {label}" for label in range(count))


@dataclass(frozen=True, kw_only=True)
class SetLayout:
    """One layout of a dataset on disk."""

    kind: str  # cifar-binary | cifar-python | idx
    directories: tuple[str, ...]  # names of the directory that holds the files; case-insensitive
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    names_file: str | None = None  # holds the class names, if present


@dataclass(frozen=True, kw_only=True)
class SetFacts:
    """What every dataset has. Channel values are on the scale 0 to 1."""

    name: str
    image_hwc: tuple[int, int, int]
    class_names: tuple[str, ...]
    num_train: int
    num_validation: int
    augmentation: str
    normalization: str
    channel_mean: tuple[float, ...]
    channel_std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True, kw_only=True)
class SetRow(SetFacts):
    """What is known about a published dataset without opening it, with its usual preprocessing."""

    train_counts: tuple[int, ...]  # published number of images of each class
    validation_counts: tuple[int, ...]
    check_mean: bool = True  # whether `verify` compares the pixels with `channel_mean`
    coarse_classes: int = 0  # CIFAR-100's first label byte
    layouts: tuple[SetLayout, ...] = ()
    how_to_get: str = ""


_FETCH_CIFAR = (
    "Fetch https://www.cs.toronto.edu/~kriz/{0}-binary.tar.gz (or {0}-python.tar.gz) "
    "and unpack it: tar xzf FILE -C DIRECTORY."
)


def _idx(*directories: str) -> SetLayout:
    return SetLayout(
        kind="idx",
        directories=directories,
        train_files=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        validation_files=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    )


def _shape(name: str, channels: int) -> tuple[int, int, int]:
    size = IMAGE_SIZES[name]
    return size, size, channels


DIGITS = SetRow(
    name="digits",
    image_hwc=_shape("digits", 1),
    class_names=DIGIT_NAMES,
    num_train=1437,
    num_validation=360,
    augmentation="crop",
    normalization="zero-one",
    channel_mean=(0.30560,),
    channel_std=(0.32399,),
    train_counts=(142, 146, 141, 146, 145, 146, 145, 143, 139, 144),
    validation_counts=(36, 36, 36, 37, 36, 36, 36, 36, 35, 36),
)

CIFAR10 = SetRow(
    name="cifar10",
    image_hwc=_shape("cifar10", 3),
    class_names=CIFAR10_NAMES,
    num_train=50_000,
    num_validation=10_000,
    augmentation="flip-crop",
    normalization="per-image",
    channel_mean=(0.49140, 0.48216, 0.44653),
    channel_std=(0.24703, 0.24349, 0.26159),
    train_counts=(5000,) * 10,
    validation_counts=(1000,) * 10,
    layouts=(
        SetLayout(
            kind="cifar-binary",
            directories=("cifar-10-batches-bin",),
            train_files=tuple(f"data_batch_{part}.bin" for part in range(1, 6)),
            validation_files=("test_batch.bin",),
            names_file="batches.meta.txt",
        ),
        SetLayout(
            kind="cifar-python",
            directories=("cifar-10-batches-py",),
            train_files=tuple(f"data_batch_{part}" for part in range(1, 6)),
            validation_files=("test_batch",),
            names_file="batches.meta",
        ),
    ),
    how_to_get=_FETCH_CIFAR.format("cifar-10"),
)

CIFAR100 = SetRow(
    name="cifar100",
    image_hwc=_shape("cifar100", 3),
    class_names=CIFAR100_NAMES,
    num_train=50_000,
    num_validation=10_000,
    augmentation="flip-crop",
    normalization="per-image",
    channel_mean=(0.50708, 0.48655, 0.44092),
    channel_std=(0.26733, 0.25644, 0.27615),
    train_counts=(500,) * 100,
    validation_counts=(100,) * 100,
    coarse_classes=20,
    layouts=(
        SetLayout(
            kind="cifar-binary",
            directories=("cifar-100-binary",),
            train_files=("train.bin",),
            validation_files=("test.bin",),
            names_file="fine_label_names.txt",
        ),
        SetLayout(
            kind="cifar-python",
            directories=("cifar-100-python",),
            train_files=("train",),
            validation_files=("test",),
            names_file="meta",
        ),
    ),
    how_to_get=_FETCH_CIFAR.format("cifar-100"),
)

MNIST = SetRow(
    name="mnist",
    image_hwc=_shape("mnist", 1),
    class_names=DIGIT_NAMES,
    num_train=60_000,
    num_validation=10_000,
    augmentation="none",
    normalization="zero-one",
    channel_mean=(0.13066,),
    channel_std=(0.30811,),
    train_counts=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    validation_counts=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    layouts=(_idx("mnist", "mnist/raw"),),
    how_to_get="Fetch the four idx files of MNIST (train-images-idx3-ubyte.gz and so on) from any mirror of it "
    "into one directory.",
)

FASHION_MNIST = SetRow(
    name="fashion_mnist",
    image_hwc=_shape("fashion_mnist", 1),
    class_names=FASHION_NAMES,
    num_train=60_000,
    num_validation=10_000,
    augmentation="flip-crop",
    normalization="zero-one",
    channel_mean=(0.28604,),
    channel_std=(0.35302,),
    train_counts=(6000,) * 10,
    validation_counts=(1000,) * 10,
    layouts=(_idx("fashion-mnist", "dataset-fashion-mnist", "fashion_mnist", "fashionmnist/raw", "data/fashion"),),
    how_to_get="On Debian or Ubuntu: apt-get install dataset-fashion-mnist (it is then found by itself). "
    "Elsewhere: git clone https://github.com/zalandoresearch/fashion-mnist.",
)

KNOWN_SETS = {row.name: row for row in (DIGITS, CIFAR10, CIFAR100, MNIST, FASHION_MNIST)}
