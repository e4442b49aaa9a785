"""Names that other trainers have for what is an option here: timm, torchvision, Keras, ultralytics, Lightning, fastai.

A name is taken for the option where its values mean the same. Where they do not, or where nothing has to be set, it is
refused with the option and with how a value becomes one of ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OtherName:
    """What a name of another trainer means here.

    `option` is empty where no option says it. `same` is whether a value means the same, so that the name is taken.
    """

    option: str
    says: str = ""
    same: bool = False

    def remedy(self, dashes: str) -> str:
        """Return the option and how it is given."""
        if not self.option:
            return self.says
        name = dashes + (self.option.replace("_", "-") if dashes else self.option)
        return f"Did you mean {name}{': ' + self.says if self.says else '?'}"


# option: names whose values mean the same
_SAME = {
    "batch_size": "b bs batch total_batch_size train_batch_size",
    "dataset_path": "data root data_path data_root dataset_dir datadir data_dir_path train_data_dir folder",
    "validation_path": "val_data val_path validation_data val_data_path val_dir valid_dir validation_dir",
    "num_epochs": "max_epochs n_epochs num_train_epochs nb_epoch",
    "learning_rate": "max_lr",
    "weight_decay": "wd",
    "optimizer": "opt optim",
    "lr_schedule": "lr_scheduler scheduler sched lrsched lr_scheduler_type",
    "image_size": "img_size imgsz img_sz img imsize train_crop_size resolution",
    "eval_resize_size": "val_resize_size",
    "num_channels": "in_chans in_channels",
    "num_classes": "nb_classes n_classes nc",
    "model_name": "arch architecture net backbone network",
    "warmup_epochs": "lr_warmup_epochs",
    "label_smoothing": "smoothing label_smoothing_factor",
    "gradient_clipping": "clip_grad clip_grad_norm global_clipnorm gradient_clip_val grad_clip max_norm max_grad_norm",
    "gradient_accumulation_count": "accumulate_grad_batches grad_accum_steps accum_steps accumulate grad_accum "
    "gradient_accumulation_steps",
    "early_stopping": "patience early_stopping_patience",
    "random_erasing": "random_erase erasing reprob",
    "color_jitter": "jitter",
    "rand_augment_magnitude": "ra_magnitude",
    "repeated_augmentation": "ra_reps",
    "ema_decay": "model_ema_decay ema_momentum",
    "time_budget": "max_time max_seconds max_train_time",
    "vertical_flip": "vflip random_vertical_flip",
    "rotation": "degrees random_rotation",
    "auto_augment": "auto_augment_policy autoaugment_policy",
    "layer_decay": "layerwise_lr_decay layer_wise_lr_decay llrd",
    "dropout_rate": "drop dropout drop_rate",
    "pipeline_num_parallel": "j workers num_workers dataloader_num_workers",
    "validation_micro_batch_size": "val_batch_size eval_batch_size validation_batch_size per_device_eval_batch_size",
    "validation_split": "val_split val_fraction valid_pct val_pct",
    "max_ckpts_to_keep": "save_total_limit",
    "weight_updates_per_epoch": "steps_per_epoch",
    "matmul_precision": "float32_matmul_precision",
    "monitor": "eval_metric metric_for_best_model",
    "output": "save_dir outdir out_dir",
    "run_name": "name experiment exp_name",
    "log_dir": "logdir default_root_dir",
    "platform": "accelerator",
}

# (names, option, how a value becomes ours)
_OTHERWISE = (
    ("train_split", "dataset_path", "its folder train is found by itself; --validation-split holds a part of it out."),
    ("no_resume_opt", "weights", "a run or file to start from, without the state of its optimizer."),
    (
        "epoch_repeats ra_sampler",
        "repeated_augmentation",
        "how often an image comes in a batch, each time augmented in another way.",
    ),
    ("color_jitter_prob grayscale_prob gaussian_blur_prob", "", "The probability is that option's: --grayscale 0.1."),
    ("drop_block drop_block_rate", "block_survival_prob", "blocks are dropped whole (stochastic depth)."),
    (
        "model_ema_warmup model_ema_steps",
        "ema_decay",
        "the average moves at each step.",
    ),
    (
        "worker_seeding use_deterministic_algorithms cudnn_benchmark",
        "seed",
        "every random number follows from it, whatever the number of threads.",
    ),
    ("save_images plots", "report", "`headrace report RUN --images` shows training images, mistakes and calibration."),
    ("no_ddp_bb sync_backend backend use_v2 rect single_cls", "", "There is nothing to choose here."),
    ("lr_warmup_method lr_warmup_decay", "warmup_epochs", "the rate grows linearly over so many epochs."),
    ("cache_dataset", "dataset_cache", "auto keeps the set decoded on the device or the host where it fits."),
    ("augmix_severity", "auto_augment", "augmix, in its usual strength."),
    ("multi_scale multiscale", "progressive_resolution", "images grow during the run."),
    (
        "val evaluate_during_training do_eval",
        "validation",
        "on unless --no-validation; `headrace validate RUN` validates a run.",
    ),
    (
        "translate shear",
        "rand_augment",
        "RandAugment and --auto-augment have both among their operations; --rand-augment-operations chooses.",
    ),
    ("flipud", "vertical_flip", "mirrors half of the images."),
    ("num_sanity_val_steps", "dry_run_steps", "a trial of so many steps and validation batches."),
    (
        "evaluation_strategy eval_strategy validation_steps",
        "validations_per_epoch",
        "how often per epoch, on the whole validation set; 1/2 is every second epoch.",
    ),
    ("save_strategy", "ckpts_per_epoch", "how often per epoch; the best and the last are kept."),
    (
        "load_best_model_at_end restore_best_weights",
        "monitor",
        "every command takes the best checkpoint of a run, by this metric.",
    ),
    ("push_to_hub hub_model_id", "", "`headrace push RUN OWNER/NAME` uploads a run, with its model card."),
    ("sample_weight", "class_weights", "a weight for each class, or balanced."),
    ("initial_epoch", "resume", "auto continues the run of the same directory where it was."),
    ("beta_1 beta_2", "optimizer_params", "beta1=0.9,beta2=0.999."),
    ("name_suffix", "run_name", "the whole name of a run; --output says its directory."),
    (
        "log_all_instances ckpt_all_instances",
        "",
        "Process 0 writes for all processes of a job: their records and weights are the same.",
    ),
    ("distributed_training", "distributed", "of document 001; poprun, mpirun and others are recognised without it."),
    (
        "pretrained finetune",
        "weights",
        "it takes a name, such as timm/resnet50.a1_in1k (`headrace models --weights` lists them), or a file.",
    ),
    (
        "checkpoint ckpt ckpt_path load initial_checkpoint load_checkpoint weights_path pretrained_path",
        "weights",
        "a file or run to start from. `headrace resume RUN` continues a run.",
    ),
    (
        "resume_from resume_from_checkpoint start_epoch load_from",
        "resume",
        "auto continues the run of the same directory; `headrace resume RUN` continues any.",
    ),
    (
        "drop_path drop_path_rate stochastic_depth stochastic_depth_prob drop_connect drop_connect_rate survival_prob",
        "block_survival_prob",
        "the probability that a branch is kept, 1 - drop_path at the last block.",
    ),
    (
        "aa",
        "auto_augment",
        "imagenet, trivial, 3-augment or augmix; RandAugment is --rand-augment 2 --rand-augment-magnitude 9.",
    ),
    (
        "aug augment augmentation use_augmentation",
        "train_augmentation",
        "auto, none, crop, flip or flip-crop; more are in `headrace train --help augment`.",
    ),
    (
        "no_aug no_augment noaug",
        "train_augmentation",
        "none.",
    ),
    (
        "hflip fliplr random_flip horizontal_flip flip",
        "train_augmentation",
        "flip or flip-crop mirror half of the images; none and crop do not.",
    ),
    (
        "scale",
        "crop_area",
        "the smallest and largest fraction of an image, such as 0.35 1.",
    ),
    (
        "ratio",
        "crop_aspect",
        "the smallest and largest aspect ratio, such as 0.75 1.33.",
    ),
    (
        "remode recount",
        "random_erasing",
        "the fraction of images in which a rectangle is set to zero.",
    ),
    (
        "hsv_h",
        "hue_jitter",
        "the largest shift of the hue.",
    ),
    (
        "hsv_s hsv_v brightness contrast saturation",
        "color_jitter",
        "one strength for brightness, contrast and saturation.",
    ),
    (
        "mixup mixup_prob mixup_p",
        "mixup_alpha",
        "the x of Beta(x, x), such as 0.2; 0 is off; with cutmix too, mixup_switch_prob chooses between them.",
    ),
    (
        "cutmix cutmix_prob cutmix_minmax",
        "cutmix_alpha",
        "the x of Beta(x, x), such as 1; 0 is off; with mixup too, mixup_switch_prob chooses between them.",
    ),
    (
        "mixup_mode mixup_off_epoch close_mosaic mosaic copy_paste",
        "mixup_alpha",
        "it holds for all images of the whole run.",
    ),
    (
        "aug_splits jsd_loss aug_repeats",
        "repeated_augmentation",
        "how often each image of a step occurs in it, augmented differently.",
    ),
    (
        "crop_pct center_crop val_crop_size crop_fraction",
        "eval_resize_size",
        "the shorter side in pixels before the crop, image_size / crop_pct.",
    ),
    (
        "interpolation train_interpolation",
        "eval_interpolation",
        "bilinear or bicubic, for validation images.",
    ),
    (
        "mean",
        "pixel_mean",
        "of each channel, from 0 to 1.",
    ),
    (
        "std",
        "pixel_std",
        "of each channel, on the scale from 0 to 1.",
    ),
    (
        "normalize rescale",
        "normalization",
        "per-channel, zero-one and others; auto fits the dataset.",
    ),
    (
        "class_map class_names classes",
        "labels",
        "a CSV file with the columns path and label; folders name their classes themselves.",
    ),
    (
        "val_ratio valid_split test_split",
        "validation_split",
        "the fraction of each class that is held out.",
    ),
    (
        "lr0 lr_base base_lr init_lr initial_lr initial_learning_rate",
        "learning_rate",
        "the peak rate of a whole batch.",
    ),
    (
        "lrf min_lr end_lr eta_min lr_end final_lr",
        "lr_schedule_params",
        "for the curves that do not end at 0; `headrace train --help lr_schedule_params`.",
    ),
    (
        "cos_lr cosine one_cycle onecycle",
        "lr_schedule",
        "cosine, one_cycle and others.",
    ),
    (
        "lr_step_size step_size decay_epochs milestones decay_milestones drop_lr",
        "lr_schedule_params",
        "boundaries and values, with --lr-schedule stepped.",
    ),
    (
        "lr_gamma gamma decay_rate lr_decay",
        "lr_schedule_params",
        "with --lr-schedule stepped or exponential.",
    ),
    (
        "lr_min warmup_lr warmup_bias_lr warmup_momentum",
        "lr_warmup_params",
        "warmup_mode and warmup_epochs; the rate rises from nearly 0.",
    ),
    (
        "warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps warmup_prefix",
        "warmup_epochs",
        "in epochs, fractions too.",
    ),
    (
        "sched_on_updates lr_noise lr_cycle_mul lr_cycle_limit cooldown_epochs patience_epochs",
        "lr_schedule",
        "the rate follows every step, and there is one cycle.",
    ),
    (
        "nesterov opt_eps eps opt_betas betas beta1 beta2 rho optimizer_kwargs opt_kwargs adam_beta1 "
        "adam_beta2 adam_epsilon",
        "optimizer_params",
        "such as nesterov=true; `headrace train --help optimizer_params`.",
    ),
    (
        "clipnorm clip_mode clipvalue clip_value gradient_clip_algorithm agc",
        "gradient_clipping",
        "the largest norm of the whole gradient.",
    ),
    (
        "norm_weight_decay bias_weight_decay no_weight_decay no_wd filter_bias_and_bn transformer_embedding_decay",
        "weight_decay_exclude",
        "regular expressions of weights that do not decay, such as bias gamma beta.",
    ),
    (
        "model_ema ema use_ema swa",
        "ema_decay",
        "such as 0.999. --average-last-epochs averages checkpoints.",
    ),
    (
        "swa_lrs swa_epoch_start",
        "average_last_epochs",
        "how many of the last epochs' checkpoints are averaged.",
    ),
    (
        "class_weight cls_pw pos_weight",
        "class_weights",
        "balanced, or a weight for each class.",
    ),
    (
        "weighted_sampler sampler oversample balanced balance",
        "balanced_sampling",
        "every class is drawn equally often.",
    ),
    (
        "bce_loss bce",
        "loss",
        "bce.",
    ),
    (
        "criterion loss_fn loss_function objective",
        "loss",
        "cross_entropy or bce; from Python any function.",
    ),
    (
        "bce_target_thresh",
        "bce_target_threshold",
        "",
    ),
    (
        "freeze_backbone freeze_base freeze_layers frozen trainable",
        "freeze",
        "backbone freezes all but the last layer; or regular expressions.",
    ),
    (
        "unfreeze head_only linear_probe",
        "freeze",
        "backbone trains the last layer alone.",
    ),
    (
        "head_lr backbone_lr lr_mult discriminative_lr differential_lr",
        "layer_lr",
        "backbone=0.1, or factors by regular expression.",
    ),
    (
        "gp global_pool head_init_scale num_features",
        "model_name",
        "the network's own head is used; networks of your own are made from Python.",
    ),
    (
        "bn_tf bn_eps batch_norm_epsilon",
        "norm_epsilon",
        "the number that is added to variances.",
    ),
    (
        "sync_bn sync_batchnorm syncbn",
        "dbn_replica_group_size",
        "the number of replicas that share their statistics.",
    ),
    (
        "dist_bn split_bn",
        "dbn_replica_group_size",
        "statistics are averaged over all replicas for validation.",
    ),
    (
        "amp fp16 bf16 half mixed_precision amp_dtype use_amp dtype",
        "precision",
        "16.32 computes in 16 bits and keeps 32-bit weights; --half-type says which 16 bits.",
    ),
    (
        "allow_tf32 tf32",
        "matmul_precision",
        "tf32.",
    ),
    (
        "gpus gpu ngpu num_gpus nproc_per_node world_size devices num_devices strategy ddp",
        "num_replicas",
        "auto takes every device; `headrace launch` starts processes on many hosts.",
    ),
    (
        "use_cpu no_cuda cuda",
        "platform",
        "auto, cpu, gpu or tpu.",
    ),
    (
        "gpu_id local_rank rank device_ids",
        "first_device",
        "the number of the first GPU.",
    ),
    (
        "dist_url dist_backend master_addr init_method num_nodes nnodes",
        "distributed",
        "`headrace launch --help` says how processes on several hosts find each other.",
    ),
    (
        "grad_checkpointing gradient_checkpointing use_checkpoint",
        "recomputation",
        "keeps less, computes more.",
    ),
    (
        "batch_split_num microbatch per_device_train_batch_size",
        "micro_batch_size",
        "the images that one device processes at once.",
    ),
    (
        "validation_batch_size_multiplier",
        "validation_micro_batch_size",
        "",
    ),
    (
        "max_steps num_steps total_steps iters max_iter fast_dev_run",
        "dry_run_steps",
        "stops a run early, to try it; a whole run has --epochs.",
    ),
    (
        "limit_train_batches overfit_batches limit_samples fraction",
        "weight_updates_per_epoch",
        "the steps of an epoch.",
    ),
    (
        "limit_val_batches val_interval check_val_every_n_epoch val_check_interval eval_every validation_freq"
        " eval_steps",
        "validations_per_epoch",
        "below 1 means every few epochs: 0.5 is every second.",
    ),
    (
        "save_period save_every save_freq save_steps checkpoint_interval recovery_interval",
        "ckpts_per_epoch",
        "below 1 means every few epochs.",
    ),
    (
        "log_interval log_every_n_steps print_freq logging_steps",
        "logs_per_epoch",
        "results of every step are fetched so often per epoch.",
    ),
    (
        "checkpoint_hist save_best save_best_only save_top_k",
        "keep_best",
        "how many of the best checkpoints are kept beside the newest.",
    ),
    (
        "nosave no_save enable_checkpointing save",
        "checkpoints",
        "--no-checkpoints saves none.",
    ),
    (
        "noval skip_val no_val",
        "validation",
        "--no-validation validates nothing.",
    ),
    (
        "nowandb log_wandb use_wandb",
        "wandb",
        "",
    ),
    (
        "logger report_to",
        "tensorboard",
        "or --wandb, --mlflow, --trackio; metrics.jsonl is always written.",
    ),
    (
        "cache cache_images use_cache",
        "dataset_cache",
        "auto, device, host and others; auto fits the dataset.",
    ),
    (
        "prefetch_factor prefetch queue_size",
        "prefetch_depth",
        "blocks of images prepared ahead.",
    ),
    (
        "deterministic random_state manual_seed benchmark",
        "seed",
        "one seed gives one result; `headrace bench` measures speed.",
    ),
    (
        "project",
        "log_dir",
        "the directory of all runs; --wandb-project names the project of Weights & Biases.",
    ),
    (
        "input_size",
        "image_size",
        "one number of pixels, such as 224.",
    ),
    (
        "exist_ok overwrite force experiment_dir",
        "output",
        "a new directory for each run; --resume auto continues one.",
    ),
    (
        "verbose quiet silent v",
        "progress",
        "bar, plain or none.",
    ),
    (
        "enable_progress_bar",
        "progress",
        "none shows nothing.",
    ),
    (
        "synthetic fake_data use_fake_data",
        "synthetic_data",
        "or --dataset synthetic.",
    ),
    (
        "dataset_download download_data",
        "download",
        "",
    ),
    (
        "test_only evaluate eval eval_only validate_only no_train",
        "training",
        "`headrace validate RUN` validates a run, --no-training validates alone.",
    ),
    (
        "tta test_time_augmentation",
        "validation_flip",
        "averages an image and its mirror image.",
    ),
    (
        "profiler profile_steps",
        "profile",
        "prints where the time of a step goes.",
    ),
    (
        "detect_anomaly terminate_on_nan",
        "fp_exceptions",
        "names the layer that made a number that is not finite; --nan-policy says what is done.",
    ),
    (
        "channels_last pin_mem pin_memory persistent_workers no_prefetcher use_multi_epochs_loader non_blocking",
        "",
        "Leave it out: data are laid out and sent ahead as suits the device, always.",
    ),
    (
        "torchcompile torch_compile compile torchscript jit fuser fast_norm jit_compile run_eagerly",
        "",
        "Leave it out: every step is compiled, and the programs are kept for the next run.",
    ),
    (
        "kd distillation distill teacher teacher_model distillation_alpha temperature",
        "",
        "There is no distillation from a teacher.",
    ),
    (
        "multi_label multilabel regression task",
        "",
        "There is one task: classification, one label for each image.",
    ),
    (
        "auto_lr_find lr_find auto_scale_batch_size",
        "",
        "`headrace lr-find` suggests a rate; a batch size is chosen by itself.",
    ),
)


def _table() -> dict[str, OtherName]:
    table: dict[str, OtherName] = {}
    rows = [(names, OtherName(option=option, same=True)) for option, names in _SAME.items()]
    rows += [(names, OtherName(option=option, says=says)) for names, option, says in _OTHERWISE]
    for names, meant in rows:
        for name in names.split():
            assert name not in table, name
            table[name] = meant
    return table


OTHER_NAMES = _table()
