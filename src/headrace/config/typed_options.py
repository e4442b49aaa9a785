"""The options as types, for editors: made by tools/typed_options.py from the rows of the options.

Nothing of this is imported when a program runs.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class Options(TypedDict, total=False):
    """The options that Model, fit and find_learning_rate take by keyword."""

    seed: int
    """Seed of all randomness in the run: weights, order of samples, augmentation, rounding; -1 draws one."""
    dry_run_steps: int | None
    """Stop after this many weight updates and validation batches, otherwise as planned: a quick trial."""
    time_budget: float | str | None
    """Time of the whole run, from its start to its last record: the run ends then, with the learning rate at its
    end. The epochs follow; those that are given are the most."""
    platform: Literal["auto", "cpu", "cuda", "rocm", "tpu", "gpu"]
    """Kind of device to run on; gpu means cuda."""
    device: Literal["auto", "cpu", "cuda", "rocm", "tpu", "gpu"]
    """The same as platform."""
    first_device: int | None
    """Number of the first GPU to use; unset leaves the choice to JAX."""
    profile: bool
    """Record a few calls after the first ones, and print where the time went, by kind of work and by block."""
    distributed: bool
    """Take the other processes of the job from $TF_CONFIG; num_replicas then counts those of one process."""
    compilation_cache_dir: str | os.PathLike[str] | None
    """Directory in which compiled programs are cached; unset means the user's cache directory, none is off."""
    executable_cache_path: str | os.PathLike[str] | None
    """The same as compilation_cache_dir."""
    target_accuracy: float | None
    """Accuracy, from 0 to 1, at which the run ends (top-1, or what monitor names); the time at which it is reached
    is recorded."""
    early_stopping: int | None
    """End the run when this many validations in a row have not improved the top-1 accuracy, or what monitor
    names."""
    monitor: str
    """Metric that decides which checkpoint is the best, and that early_stopping and target_accuracy look at; of
    equal ones the lower loss is better. balanced_accuracy and macro_f1 count every class the same."""
    dataset: Literal[
        "digits",
        "cifar10",
        "cifar100",
        "mnist",
        "fashion_mnist",
        "auto",
        "imagenet",
        "imagenette",
        "imagenette160",
        "packed",
        "npz",
        "parquet",
        "tfrecord",
        "tfds",
        "array_record",
        "tar",
        "folder",
        "csv",
        "generated",
        "synthetic",
        "gc_imagenet",
    ]
    """Dataset to train on; auto detects the kind of files in dataset_path."""
    dataset_path: str | os.PathLike[str]
    """Directory of the dataset or its parent, or its address in a store (s3://, gs://, az://, hf://, https://); if
    not given $DATASETS_DIR, then $DATA_DIR."""
    data_dir: str | os.PathLike[str]
    """The same as dataset_path."""
    validation_path: str | os.PathLike[str] | None
    """Folder of validation images, one folder per class, if they are not in dataset_path; all images of
    dataset_path (or of train in it) are then for training."""
    task: Literal["classification", "multilabel", "regression", "classify", "regress", "tagging"]
    """What the network says of an image: its class, any number of labels (multilabel), or one or several numbers
    (regression). Labels of the last two come from a CSV file (labels), an .npz file or arrays."""
    image_column: str | None
    """Name of the column of images in the CSV file of labels; unset means path, file, image and the like."""
    label_column: str | None
    """Name of the column of classes in the CSV file of labels; unset means label, class, target and the like. For
    regression and multilabel also several names, separated by commas, of columns of numbers or of 0 and 1."""
    target_mean: float | Sequence[float] | None
    """What is subtracted from each target of a regression in training; unset means the mean of the training
    images."""
    target_std: float | Sequence[float] | None
    """What each target of a regression is then divided by; unset means the standard deviation in training."""
    image_suffix: str | None
    """What follows each value in the column of images, such as .jpg, where it holds names without it."""
    label_pattern: str | None
    """Regular expression whose one group is the class in the name of an image file: '(.+)_[0-9]+[.]jpg' for
    cat_12.jpg; folders are then no classes."""
    download: bool
    """Download the dataset if its files are not found, as headrace data get does."""
    generated_data: bool
    """Replace the dataset's images with random ones of the same shape and number, generated on the host."""
    synthetic_data: Literal["device", "ipu", "host", "cpu"] | None
    """Replace the dataset's images with random ones, generated on the device (ipu means the same), or on the host
    as with generated_data."""
    image_size: int | None
    """Height and width of images as the network sees them; unset fits the dataset."""
    sent_image_size: int | None
    """Height and width of training images as they are sent; the device crops image_size from each at random. Unset
    sends image_size."""
    decode_once: Literal["auto", "on", "off"]
    """Decode each training image once, to sent_image_size (unset: twice image_size), keep it in memory, and crop it
    at random on the device; auto means on an accelerator, if all fit dataset_device_budget."""
    num_channels: int
    """Channels of synthetic or decoded images: 3 (RGB) or 1 (grey)."""
    num_samples: int | None
    """Training images of a synthetic dataset."""
    validation_split: float
    """Fraction of each class that is held out if a dataset of image files has no validation part."""
    train_crop: Literal["auto", "reference", "torchvision", "valid"]
    """How training images are cropped: at random, as in the reference or torchvision, or as in validation."""
    crop_area: float | Sequence[float] | None
    """Smallest and largest fraction of an image that a random crop covers; unset means train_crop's."""
    crop_aspect: float | Sequence[float] | None
    """Smallest and largest aspect ratio (width to height) of a random crop; unset means train_crop's."""
    crop_padding: int
    """Pixels added on every side of a training image that is then cropped at random to its own size."""
    crop_fill: Literal["zero", "reflect"]
    """What crop_padding adds: zeros, or the image mirrored at its edge."""
    eval_resize_size: int | None
    """Shorter side of validation images before the centre crop; unset means image_size * 256 / 224."""
    eval_interpolation: Literal["bilinear", "bicubic"]
    """How validation images are resized; bicubic is for weights that were trained elsewhere with it."""
    eval_reduced_decoding: bool
    """Decode JPEGs that are at least twice as large as needed at 1/2, 1/4 or 1/8 of their size in a run's
    validations: quicker, but other pixels, whose accuracies are not comparable with those of other programs."""
    resize_antialias: bool
    """Average over all pixels when an image is shrunk; off interpolates between four neighbours."""
    verify_dataset: bool
    """Check the whole dataset before the first step, as headrace data verify does, and stop at any problem."""
    max_bad_samples: float
    """Fraction of broken images above which a run stops (one is always allowed, unless it is 0); each is replaced
    by the next of its class."""
    train_augmentation: Literal["auto", "none", "crop", "flip", "flip-crop"]
    """Random changes of training images; auto chooses what suits the dataset."""
    normalization: Literal["auto", "per-image", "per-channel", "centred", "zero-one", "none"]
    """How pixels become numbers for the network; auto chooses what suits the dataset."""
    normalisation: Literal["auto", "per-image", "per-channel", "centred", "zero-one", "none"]
    """The same as normalization."""
    normalise_input: bool | None
    """On means normalization per-channel, off means centred (only the mean is subtracted)."""
    normalize_input: bool | None
    """The same as normalise_input."""
    pixel_mean: float | Sequence[float] | None
    """Mean of each channel's pixels, from 0 to 1, for normalization per-channel or centred; unset means the
    dataset's."""
    pixel_std: float | Sequence[float] | None
    """Standard deviation of each channel's pixels, on the scale of pixel_mean, for normalization per-channel; unset
    means the dataset's."""
    accelerator_side_preprocess: bool
    """Normalise and augment on the device instead of on the host."""
    eight_bit_transfer: bool | None
    """Send images as 8-bit numbers; unset means whenever preprocessing is on the device."""
    eight_bit_io: bool | None
    """The same as eight_bit_transfer."""
    fused_preprocessing: bool
    """Normalise in one pass; this is always done on the device, and no fourth channel is added."""
    shuffle: bool
    """Shuffle the training images anew in every epoch."""
    balanced_sampling: bool
    """Sample every class equally often, repeating the images of small ones."""
    repeated_augmentation: int
    """How often each image of a step occurs in it, augmented differently each time; an epoch keeps its length, and
    so uses only that fraction of the images."""
    dataset_cache: Literal["auto", "device", "host", "raw", "decoded", "none"]
    """Where the dataset is kept; auto means on the device if it fits dataset_device_budget, raw and decoded (for
    images) in the host's memory."""
    dataset_host_budget: int | str
    """Bytes of host memory for images kept raw or decoded, or decoded once beyond dataset_device_budget."""
    dataset_disk_budget: int | str
    """Bytes of this machine's disk for what was fetched from a store; 0 keeps nothing."""
    dataset_device_budget: int | str
    """Bytes of device memory that the dataset may take."""
    pipeline_num_parallel: int | None
    """Threads that prepare images on the host; unset means as many as there are processors."""
    prefetch_depth: int
    """Blocks of images prepared ahead of the device."""
    color_jitter: float
    """Strength of random brightness, contrast and saturation: each factor lies between 1 - x and 1 + x; 0 is
    off."""
    colour_jitter: float
    """The same as color_jitter."""
    hue_jitter: float
    """Largest random shift of the hue, as a fraction of the colour circle; 0 is off."""
    grayscale: float
    """Fraction of training images that lose their colours; 0 is off."""
    gaussian_blur: float
    """Fraction of training images that are blurred, by a Gaussian of 0.1 to 2 pixels; 0 is off."""
    vertical_flip: bool
    """Turn half of the training images upside down, at random."""
    rotation: float
    """Rotate training images by up to this many degrees, either way; 0 is off."""
    random_erasing: float
    """Fraction of training images in which a random rectangle is set to zero; 0 is off."""
    rand_augment: int
    """Random operations applied to each training image, one after the other (RandAugment); 0 is off."""
    randaugment: int
    """The same as rand_augment."""
    rand_augment_magnitude: float
    """Strength of the operations of rand_augment, from 0 to 30."""
    rand_augment_std: float
    """Standard deviation of rand_augment_magnitude, drawn for each image and operation; 0 keeps it fixed."""
    rand_augment_probability: float
    """Probability that each operation of rand_augment is applied."""
    rand_augment_operations: str | Sequence[str]
    """Operations that rand_augment chooses from; unset means all but equalize, which needs a histogram."""
    auto_augment: (
        Literal["imagenet", "trivial", "3-augment", "augmix", "autoaugment", "ta_wide", "trivialaugment", "3"] | None
    )
    """A policy without settings: imagenet is AutoAugment's, trivial is TrivialAugment (wide), 3-augment one of
    grey, inverted light and blur (DeiT III), augmix a mixture of chains; unset is off."""
    autoaugment: (
        Literal["imagenet", "trivial", "3-augment", "augmix", "autoaugment", "ta_wide", "trivialaugment", "3"] | None
    )
    """The same as auto_augment."""
    alternating_flip: bool
    """Mirror each image in every second epoch, half of them in the first, instead of at random: no image comes the
    same way twice running."""
    mixup_alpha: float
    """Mixup: each image is mixed with its neighbour in the micro-batch by a factor from Beta(x, x); 0 is off."""
    cutmix_lambda: float
    """Cutmix: fraction of an image that is kept when a box of another is pasted in (see cutmix_version); 1 is
    off."""
    cutmix_version: int
    """Meaning of cutmix_lambda: 1 draws a fraction for each micro-batch, 2 uses cutmix_lambda itself."""
    cutmix_alpha: float
    """Cutmix by its usual formula, instead of cutmix_lambda: the fraction kept is drawn from Beta(x, x); 0 is
    off."""
    mixup_switch_prob: float | None
    """With mixup and cutmix: probability that a micro-batch gets cutmix, else it gets mixup; unset applies both."""
    train_image_size: int | None
    """Height and width of training images, shrunk on the device from image_size; unset means image_size, with which
    validation is always done."""
    progressive_resolution: int | None
    """Height and width of training images at the start of the run, growing to full size; unset is off."""
    progressive_resolution_end: float
    """Fraction of the run after which images have their full size."""
    progressive_resolution_sizes: int
    """Number of different sizes, from the first to the full one; each is compiled once."""
    model_name: str
    """Network to train, or a family together with model_size; `headrace models` lists them."""
    model: str
    """The same as model_name."""
    model_size: str | None
    """Size of the network where model_name names a family: 50, B4, v3_small."""
    model_dialect: Literal["reference", "torchvision", "timm", "keras"]
    """Whose padding, epsilon and shortcuts to use where definitions of a network differ, so that its weights
    fit."""
    norm_layer: str | Mapping[str, object]
    """Normalisation layer: name batch_norm, group_norm (with num_groups or channels_per_group; with neither, the
    number of groups that suits the family), layer_norm or none."""
    batch_norm: bool
    """Use batch norm; short for norm_layer."""
    groups: int | None
    """Use group norm with this number of groups; short for norm_layer."""
    group_norm: bool
    """Use group norm with the number of groups that suits the family; off is batch norm. Short for norm_layer."""
    group_order: Literal["contiguous", "strided"]
    """Which channels form a group: neighbours, or (strided) those with the same index modulo the number of
    groups."""
    proxy_norm: bool
    """Normalise activations after group or layer norm by a Gaussian proxy's moments."""
    proxy_epsilon: float
    """Epsilon added to the variances of the proxy."""
    bn_momentum: float
    """Fraction of batch norm's running statistics that is kept at each step."""
    bn_decay: float
    """The same as bn_momentum."""
    bn_momentum_start: float | None
    """Fraction kept at the first steps; it rises with the steps so far, as 1 - 60 / steps, to bn_momentum. Unset
    means bn_momentum from the start."""
    norm_epsilon: float | None
    """Epsilon added to variances in normalisation; unset means the model's own."""
    stable_norm: bool
    """Compute variances in two passes: slower but more accurate."""
    dbn_replica_group_size: int
    """Number of consecutive replicas that share batch-norm statistics; 1 means each has its own."""
    bn_span: int
    """The same as dbn_replica_group_size."""
    shortcut: Literal["auto", "pad-end", "pad-both", "projection", "pool"]
    """Shortcut of a ResNet unit that changes shape: a 1x1 convolution (projection), the mean of 2x2 pixels before
    it (pool), or, in basic units, zero channels at the end or on both sides."""
    stem: Literal["imagenet", "deep", "cifar"] | None
    """First layers of a ResNet: a 7x7 convolution (imagenet) or three 3x3 ones (deep), each with stride 2 and a
    pool, or one 3x3 at full size (cifar); unset means the network's own."""
    downsample: Literal["stride", "blur", "max-blur"]
    """How ResNet units and stems halve an image: every second pixel of a convolution (stride), blurred by 1 2 1
    before (blur), or the blurred maximum of 2x2 pixels before the unit (max-blur)."""
    zero_init_residual: bool | None
    """Start every ResNet unit as its shortcut, with 0 as the scale of its last norm; unset means bottleneck units
    without a convolution in the shortcut."""
    convolution_groups: int | None
    """Groups of a ResNeXt's 3x3 convolutions, its cardinality; unset means 32."""
    group_dim: int | None
    """Channels of a convolution's group; unset means 4 for ResNeXt, 1 for EfficientNet."""
    widenet: bool
    """Use the wide CIFAR ResNeXts, with four times the channels."""
    expand_ratio: int | None
    """Expansion ratio inside EfficientNet blocks; unset means 6."""
    width_coefficient: float | None
    """Factor on an EfficientNet's channels."""
    depth_coefficient: float | None
    """Factor on the number of an EfficientNet's blocks."""
    depth_divisor: int | None
    """Round an EfficientNet's channels to multiples of this; unset means 8."""
    dropout_rate: float | None
    """Fraction of features dropped before the classifier."""
    block_survival_prob: float | None
    """Probability, at the last block, that a residual branch is kept in training (stochastic depth); unset means
    the network's own."""
    activation: Literal["relu", "swish", "mish", "gelu", "hard_swish", "silu"] | None
    """Activation function of a ResNet (unset means relu) or a FastNet (gelu)."""
    use_relu: bool
    """Use ReLU instead of swish in EfficientNets."""
    se: bool
    """Use squeeze-and-excite in EfficientNets."""
    top_width: int | None
    """Channels of the layer before the classifier, 0 for no such layer; unset means the network's own."""
    use_bypass: bool
    """Add shortcuts around every second fire module of a SqueezeNet."""
    init_ema: bool
    """Use the averaged weights (EMA) of a checkpoint instead of the raw ones."""
    init_min_loaded: float
    """Fraction of the network's weights, and of the file's, that must match."""
    whiten_images: int
    """Make the filters of the first convolution from patches of this many training images, so that its outputs are
    uncorrelated (freeze can keep them so); 0 draws them."""
    freeze: str | Sequence[str] | int
    """Regular expressions; weights whose name matches one are frozen, and so are their batch-norm statistics. The
    word backbone stands for all but the last layer."""
    variable_filter: str | Sequence[str] | int
    """Substrings; only weights whose name contains one of them are trained, all others are frozen."""
    layer_lr: str | Mapping[str, object]
    """Factors on the learning rate by regular expression, such as ^conv1/=0.1, or by the word backbone; the first
    match counts."""
    layer_decay: float
    """Factor on the learning rate of each layer (a block with a matrix of weights) beside that of the next: 0.75
    trains the last at the full rate, the one before at 0.75 of it, then 0.56; 1 is off."""
    batch_size: int | None
    """Images of one weight update, over all replicas. Micro-batches follow from it: the largest of at most
    micro_batch_size, if that is given."""
    micro_batch_size: int | None
    """Images that one replica processes in one forward and backward pass; unset follows from batch_size."""
    num_replicas: int | Literal["auto"] | None
    """Data-parallel copies of the model; auto makes one for each device, or group of devices for the stages. Unset
    means auto on accelerators, 1 on CPUs."""
    replicas: int | Literal["auto"] | None
    """The same as num_replicas."""
    gradient_accumulation_count: int | None
    """Micro-batches per replica whose gradients are averaged for one weight update; unset means 1."""
    gradient_accumulation: int | None
    """The same as gradient_accumulation_count."""
    global_batch_size: int | None
    """Images per weight update, rounded to a multiple of micro_batch_size x num_replicas; batch_size is exact."""
    gradient_accumulation_dtype: Literal["float32", "bfloat16", "float16"]
    """Number format in which gradients are accumulated."""
    num_epochs: int
    """Passes over the training images."""
    epochs: int
    """The same as num_epochs."""
    weight_updates_per_epoch: int
    """Weight updates per epoch; -1 means as many as the dataset has whole batches."""
    steps_per_epoch: int
    """The same as weight_updates_per_epoch."""
    logs_per_epoch: float | str
    """How often per epoch results are fetched from the device; below 1 means every few epochs, 0 only at the
    end."""
    events_divide_epoch: bool
    """Move events to the nearest frequency that divides an epoch; off puts each after the step nearest to its
    time."""
    max_steps_per_call: int | None
    """Most weight updates per call of the device program; unset means no limit."""
    batches_per_step: int | None
    """The same as max_steps_per_call."""
    call_seconds: float
    """Longest call in seconds, 0 for no limit. Between two calls progress is shown and signals are obeyed."""
    stream_results: bool
    """Report each step while a call runs, on the progress line and to Callback.on_step, not only at its end; for
    calls that last long."""
    ckpts_per_epoch: float | str | None
    """How often per epoch a checkpoint is saved; unset means logs_per_epoch, at most 1; 0 only at the end."""
    validations_per_epoch: float | str | None
    """How often per epoch the model is validated; unset means logs_per_epoch, at most 1; 0 only at the end."""
    pipeline_splits: str | Sequence[str] | int
    """Blocks that start a new pipeline stage; or one number: that many splits, chosen to balance the stages."""
    num_pipeline_stages: int
    """Number of pipeline stages, split so that they are balanced; an alternative to pipeline_splits."""
    split_include_filter: str | Sequence[str] | int
    """Parts of block names: stages that are split automatically start only at blocks that have one of them."""
    sharding_include_filter: str | Sequence[str] | int
    """The same as split_include_filter."""
    split_exclude_filter: str | Sequence[str] | int
    """Parts of block names: stages that are split automatically never start at blocks that have one of them."""
    sharding_exclude_filter: str | Sequence[str] | int
    """The same as split_exclude_filter."""
    device_mapping: Sequence[int]
    """Device of each stage, such as 0 1 1 0; unset means one device per stage."""
    pipeline_schedule: Literal["Grouped", "Interleaved", "Sequential", "GPipe", "ZeroBubble"]
    """Order in which the stages process the micro-batches of a step."""
    recomputation: bool
    """Keep only the inputs of a stage for the backward pass, and recompute the rest."""
    enable_recomputation: bool
    """The same as recomputation."""
    enable_recompute: bool
    """The same as recomputation."""
    xla_recompute: bool
    """The same as recomputation."""
    recomputation_points: str | Sequence[str] | int
    """Regular expressions of blocks whose inputs recomputation keeps in addition to those of the stages."""
    optimizer_state_offloading: bool
    """Keep the optimizer's state (and averaged weights) in host memory, and stream it in for each update."""
    offload_weight_update_variables: bool
    """The same as optimizer_state_offloading."""
    variable_offloading: bool
    """The same as optimizer_state_offloading."""
    replicated_optimizer_state_sharding: bool
    """Shard the optimizer's state (and averaged weights) over the replicas; each updates its part."""
    rts: bool
    """The same as replicated_optimizer_state_sharding."""
    measure_splits: bool
    """Time every block on the device first, and split the stages by these times instead of by estimates."""
    block_seconds: str | Mapping[str, object]
    """Seconds that each block takes, instead of an estimate; --measure-splits fills it in."""
    device_memory: int | str | None
    """Memory of a device, such as 16GiB, into which automatically split stages must fit."""
    trace_schedule: bool
    """Measure the schedule of one step as it really runs, and plot it next to the planned one in the run
    directory."""
    strict_pipeline: bool
    """Refuse numbers of micro-batches that the schedule does not accept on the hardware it was designed for."""
    precision: Literal["16.16", "16.32", "32.32"]
    """Bits of the computation and of the weights and their update: compute.update."""
    half_type: Literal["bfloat16", "float16"]
    """The 16-bit number format."""
    matmul_precision: Literal["default", "tf32", "float32", "tensorfloat32", "high", "highest"]
    """How accelerators multiply float32 values in convolutions and matrix products: default leaves it to XLA, which
    may take TF32 on GPUs and bfloat16 on TPUs; tf32 has three digits; float32 has all."""
    stochastic_rounding: bool
    """Round 16-bit weights up or down at random, so that small updates are not lost on average."""
    loss_scaling: float | Literal["dynamic", "stepped", "doubling"]
    """Factor on the loss that keeps small float16 gradients from underflowing; dynamic adapts it, stepped and
    doubling change it at given epochs, 0 is off."""
    loss_scaling_params: str | Mapping[str, object]
    """Settings of a loss scale that changes. dynamic: initial, growth_interval, growth_factor, backoff_factor, max;
    stepped: values, and boundaries in epochs; doubling: initial and final, in equal parts of the run."""
    fp_exceptions: bool
    """Find the first layer that produces a non-finite number, and report it."""
    nan_policy: Literal["stop", "skip"]
    """What to do about a non-finite loss or gradient."""
    optimizer_params: str | Mapping[str, object]
    """Settings of the optimizer."""
    optimiser_params: str | Mapping[str, object]
    """The same as optimizer_params."""
    momentum: float | None
    """Momentum, for optimizers that have one; unset means the one of optimizer_params."""
    lr_schedule: Literal[
        "const",
        "cosine",
        "flat_cosine",
        "one_cycle",
        "stepped",
        "drops",
        "polynomial",
        "linear",
        "exponential",
        "polynomial_decay_lr",
    ]
    """Shape of the learning rate over the run."""
    lr_schedule_params: str | Mapping[str, object]
    """Settings of lr_schedule; initial_learning_rate is per image, absolute_learning_rate for the global batch."""
    learning_rate: float | None
    """Peak learning rate of a step, whatever the curve and the batch size; unset means the one of
    lr_schedule_params, if that has one."""
    lr: float | None
    """The same as learning_rate."""
    lr_warmup_params: str | Mapping[str, object] | None
    """Warm-up of the learning rate: warmup_mode (shift or mask) and warmup_epochs; unset means none."""
    warmup_epochs: float | None
    """Epochs over which the learning rate rises to its peak, 0 for none; unset means those of lr_warmup_params."""
    lr_staircase: bool
    """Keep the learning rate constant within an epoch."""
    bce_target_threshold: float | None
    """With bce: classes whose (mixed) target exceeds this count as 1, the others as 0; unset keeps the target."""
    label_smoothing: float
    """Fraction of the target that is spread evenly over all classes; with multilabel, that makes it one half."""
    label_smoothing_classes: Literal["all", "others"]
    """Classes over which label_smoothing s is spread: all (s / C each) or the others (s / (C - 1) each)."""
    class_weights: Literal["balanced"] | Sequence[float]
    """Weight of each class in the loss; balanced means images / (number of classes x images of the class)."""
    l2_regularization: float
    """Multiple of the weights that is added to the gradients before the optimizer (coupled)."""
    l2_regularisation: float
    """The same as l2_regularization."""
    weight_decay: float
    """Multiple of the weights, times the learning rate, that is subtracted after the optimizer (decoupled); lamb
    adds it before its trust ratio."""
    weight_decay_exclude: str | Sequence[str] | int
    """Regular expressions; parameters whose name matches one get no weight decay and no L2 regularization."""
    lookahead: int
    """Steps after which slow weights move halfway to the trained ones, which start again from there; 0 is off, 6 is
    usual."""
    gradient_clipping: float
    """Largest norm of the whole gradient; longer ones are scaled down to it, 0 is off."""
    ema_decay: float
    """Decay of a moving average of the weights, which is validated separately; 0 is off."""
    validation: bool
    """Measure the accuracy on held-out images, during training and at its end."""
    validation_micro_batch_size: int | None
    """Images per replica in one validation pass; unset means micro_batch_size."""
    valid_batch_size: int | None
    """The same as validation_micro_batch_size."""
    validation_num_replicas: int | None
    """Replicas that validate; unset means one on each device of the training replicas."""
    validation_cache: Literal["auto", "device", "host", "none"]
    """Where decoded validation images are kept; auto means on the device, else on the host, within the budgets."""
    validation_device_budget: int | str
    """Bytes of a device's memory for validation images, unless dataset_cache keeps them there."""
    validation_host_budget: int | str
    """Bytes of a process's memory for validation images."""
    validation_flip: bool
    """Validate the mean of the class scores of an image and of its mirror image; takes twice as long."""
    validation_shift: int
    """Validate with images moved by so many pixels, too, up and to the left and down and to the right: half of the
    mean of the class scores. Takes three times as long."""
    pipeline_validation_model: bool
    """Validate through the stages of the pipeline instead of with the whole network on each device."""
    checkpoints: bool
    """Save checkpoints."""
    checkpoint_dir: str | os.PathLike[str] | None
    """Directory of the checkpoints; unset means `checkpoints` in the run's directory. current_time in its name
    stands for the time at which the run starts."""
    clean_dir: bool
    """Delete the checkpoints when the run has finished successfully."""
    max_ckpts_to_keep: int
    """Number of newest checkpoints to keep."""
    keep_best: int
    """Number of best checkpoints, by validation accuracy, to keep in addition."""
    average_last_epochs: float | Sequence[float] | None
    """After training, average the checkpoints of the last N epochs, for each N given; keeps all checkpoints."""
    weight_avg_n: float | Sequence[float] | None
    """The same as average_last_epochs."""
    average_decays: float | Sequence[float] | None
    """After training, take an exponential average of all checkpoints, for each decay given; keeps all
    checkpoints."""
    weight_avg_exp: float | Sequence[float] | None
    """The same as average_decays."""
    log_dir: str | os.PathLike[str]
    """Directory in which each run gets a directory of its own, here or in a store."""
    output: str | os.PathLike[str] | None
    """Directory of the run, here or in a store (s3://, gs://, az://); the short form of log_dir and run_name."""
    output_dir: str | os.PathLike[str] | None
    """The same as output."""
    run_name: str | None
    """Name of the run's directory; unset means model, dataset and time."""
    progress: Literal["auto", "bar", "plain", "none"]
    """What the console shows; auto means a live bar on a terminal and plain lines elsewhere."""
    report: bool
    """Write report.html, with curves and results, when a process of the run ends."""
    tensorboard: bool
    """Write event files for TensorBoard into the run's directory (extra tensorboard)."""
    wandb: bool
    """Track the run with Weights & Biases, offline if nobody is logged in (extra wandb)."""
    mlflow: bool
    """Track the run with MLflow, in the run's directory or at MLFLOW_TRACKING_URI (extra mlflow)."""
    trackio: bool
    """Track the run with Trackio, in the user's cache or where TRACKIO_SERVER_URL says (extra trackio)."""
    histograms: bool
    """Send histograms of each block's weights and gradients to TensorBoard, W&B and Trackio with every record."""
    wandb_project: str
    """Weights & Biases project of the run."""
    wandb_run_name: str | None
    """Weights & Biases name of the run; unset means the name of its directory."""
    wandb_tags: str | Sequence[str] | int
    """Weights & Biases tags of the run."""
    half_partials: bool
    """Let matrix products return 16-bit sums, as convolutions do; off means 32-bit sums, rounded when used."""
    enable_half_partials: bool
    """The same as half_partials."""
    internal_exchange_optimization_target: Literal["cycles", "memory", "balanced"] | None
    """What the compiler optimises for: cycles (time), memory, or a balance of both."""
    internal_exchange_optimisation_target: Literal["cycles", "memory", "balanced"] | None
    """The same as internal_exchange_optimization_target."""
    max_cross_replica_buffer_size: int | None
    """Most bytes of gradients that are combined into one all-reduce; 0 combines none."""
    max_reduce_many_buffer_size: int | None
    """Most bytes that are combined into one reduce-scatter or all-gather; 0 combines none."""
    cpu_kernels: Literal["auto", "on", "no-winograd", "off"]
    """Compute convolutions on the CPU with Headrace's kernels instead of XLA's: auto where they are compiled and
    faster, on (an error where they are missing), no-winograd (on, by plain products), or off."""
    convolution_tuning: Literal["auto", "full", "quick"]
    """On one NVIDIA GPU, try every algorithm that cuDNN has for each convolution of training (full), or only those
    that it recommends (quick): compiling takes less time, and steps of large images and batches up to 7 % more.
    auto is quick where a micro batch is little work."""
    concurrent_kernels: Literal["auto", "on", "off"]
    """On one NVIDIA GPU, run kernels of a training step at the same time where none needs the other's results:
    small networks, images and batches train 3 to 28 % faster, in up to 30 % more memory. auto does so where
    convolutions are tuned quickly."""
    available_memory_proportion: float | Sequence[float]
    """Percentage of a device's memory for the workspace of convolutions and matrix products; one value, or two per
    stage."""


class FitOptions(Options, total=False):
    """The options of fit."""

    num_classes: int | None
    """Classes of a synthetic dataset."""


class ModelOptions(Options, total=False):
    """The options of Model."""

    labels: str | os.PathLike[str] | None
    """CSV file that lists images: columns path, label and, optionally, split (train, val, test). Several labels of
    an image are separated by |, ; or spaces."""
    optimizer: Literal[
        "sgd", "momentum", "muon", "adamw", "adam", "nadam", "radam", "lion", "rmsprop", "lars", "lamb", "given"
    ]
    """Optimizer; sgd applies the learning rate before the momentum, momentum applies it after."""
    optimiser: Literal[
        "sgd", "momentum", "muon", "adamw", "adam", "nadam", "radam", "lion", "rmsprop", "lars", "lamb", "given"
    ]
    """The same as optimizer."""
    loss: Literal["cross_entropy", "bce", "mse", "mae", "huber", "smooth_l1", "l1", "l2"]
    """Loss: softmax cross entropy, or bce, the mean over the classes of binary cross entropies (sigmoid); of a
    regression mse, mae or huber, on targets normalised by target_mean and target_std."""
    resume: Literal["never", "auto"]
    """What train does if its run directory already holds a run of the same configuration; auto resumes it."""
