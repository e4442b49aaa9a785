"""A whole training job in plain PyTorch: the peer of `headrace train` in whole_jobs.py.

    python benchmarks/torch_job.py --arrays cifar10.npz --model resnet20 --epochs 30 --batch 256 --amp
    python benchmarks/torch_job.py --folder photos --model resnet50 --image-size 128 --batch 64 --amp --compile default
    python benchmarks/torch_job.py --arrays four.npz --model resnet8 --init-from six.pth --backbone-rate 0.1

DataLoader with persistent workers and pinned memory, 8-bit transfers and normalisation on the device, channels last,
autocast to bfloat16, fused SGD with Nesterov momentum, cosine curve after a linear warm-up, a validation after each
epoch, the weights saved at the end. The last line is JSON: accuracy, and seconds by part. `--arrays` is an .npz of
x, y, xt, yt (8-bit images [N, H, W, C] and labels), mean and std (of pixels from 0 to 1), held in memory; `--folder`
has train/CLASS and val/CLASS. CIFAR ResNets have the usual names of weights, so that files of others fit.
"""
# pyright: reportMissingImports=false

import time

STARTED = time.time()  # before the long imports

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch_peer import CifarResNet, update  # noqa: E402

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build(name, channels, num_classes):
    """Return the network: a CIFAR ResNet, or one of torchvision's."""
    if name in ("resnet8", "resnet20", "resnet56"):
        return CifarResNet((int(name[6:]) - 2) // 6, False, channels, num_classes)
    from torchvision import models

    return getattr(models, name)(num_classes=num_classes)


class Arrays(torch.utils.data.Dataset):
    """Images in memory; a batch is cropped and flipped as one tensor, not image by image."""

    def __init__(self, images, labels, augment, mean=None):
        self.images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.augment = augment
        if "crop" in augment:  # a border of the mean colour, which is 0 once normalised, as Headrace has it
            count, channels, height, width = self.images.shape
            border = torch.from_numpy(np.round(255 * np.asarray(mean)).astype(np.uint8))[None, :, None, None]
            padded = border.expand(count, channels, height + 8, width + 8).clone()
            padded[:, :, 4:-4, 4:-4] = self.images
            self.images = padded

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, index):
        index = torch.tensor(index)
        x = self.images[index]
        if "crop" in self.augment:
            count, size = len(index), x.shape[-1] - 8
            rows, columns = (torch.randint(0, 9, (count, 1)) + torch.arange(size)[None] for _ in range(2))
            x = x[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        if "flip" in self.augment:
            x = torch.where((torch.rand(len(index)) < 0.5)[:, None, None, None], x.flip(3), x)
        return x.contiguous(memory_format=torch.channels_last), self.labels[index]


def same(batch):
    """Pass on a batch that is one already."""
    return batch


def open_data(args):
    """Return (training set, validation set, collate function, mean, standard deviation, classes)."""
    if args.arrays:
        with np.load(args.arrays) as file:
            x, y, xt, yt, mean, std = (file[key] for key in ("x", "y", "xt", "yt", "mean", "std"))
        return Arrays(x, y, args.augment, mean), Arrays(xt, yt, "none"), same, mean, std, int(y.max()) + 1
    from torchvision import datasets, transforms

    size = args.image_size
    train = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    valid = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size), transforms.PILToTensor()]
    sets = [
        datasets.ImageFolder(Path(args.folder) / part, transforms.Compose(steps))
        for part, steps in (("train", train), ("val", valid))
    ]
    return *sets, None, IMAGENET_MEAN, IMAGENET_STD, len(sets[0].classes)


def rate(step, total, warmup, peak):
    """Return the learning rate: a linear warm-up, then a cosine that would reach 0 after `total` steps."""
    ramp = min(step + 1, warmup + 1) / (warmup + 1)
    return peak * ramp * 0.5 * (1 + math.cos(math.pi * max(step - warmup, 0) / total))


def main():
    """Train, validate, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays")
    parser.add_argument("--folder")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--init-from", help="state dict to start from; tensors of another shape are left out")
    parser.add_argument("--backbone-rate", type=float, default=1.0, help="factor on the rate before the last layer")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--augment", default="flip-crop", choices=("none", "crop", "flip", "flip-crop"))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr-per-image", type=float, default=0.1 / 256)
    parser.add_argument("--lr", type=float, help="rate of a step [lr-per-image x batch]")
    parser.add_argument("--warmup-epochs", type=float, default=5)
    parser.add_argument("--cosine-epochs", type=float, help="length of the cosine after the warm-up [all epochs]")
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--validate", default="epochs", choices=("epochs", "end"))
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--compile", help="mode of torch.compile; eager without")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="model.pth")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"

    train_set, valid_set, collate, mean, std, num_classes = open_data(args)
    common = {
        "num_workers": args.workers,
        "pin_memory": on_gpu,
        "persistent_workers": args.workers > 0,
        "prefetch_factor": 4 if args.workers else None,
        "collate_fn": collate,
    }
    loader = torch.utils.data.DataLoader(train_set, args.batch, shuffle=True, drop_last=True, **common)
    valid_loader = torch.utils.data.DataLoader(valid_set, args.batch, **common)

    channels = len(mean)
    net = build(args.model, channels, num_classes)
    if args.init_from:
        found, own = torch.load(args.init_from, map_location="cpu"), net.state_dict()
        net.load_state_dict({key: found[key] for key in own if own[key].shape == found[key].shape}, strict=False)
    net = net.to(device, memory_format=torch.channels_last)
    *backbone, head_weight, head_bias = net.parameters()
    parts = [{"params": backbone, "factor": args.backbone_rate}, {"params": [head_weight, head_bias], "factor": 1.0}]
    optimizer = torch.optim.SGD(parts, lr=1.0, momentum=0.9, nesterov=True, weight_decay=args.l2, fused=on_gpu or None)
    mean, std = (torch.tensor(np.array(each) * 255, dtype=torch.float32, device=device) for each in (mean, std))
    forward = torch.compile(net, mode=args.compile) if args.compile else net
    total = (args.cosine_epochs or args.epochs) * len(loader)
    warmup, peak = int(args.warmup_epochs * len(loader)), args.lr or args.lr_per_image * args.batch

    def sent(x, y):
        x = x.to(device, non_blocking=True, memory_format=torch.channels_last).float()
        return (x - mean[:, None, None]) / std[:, None, None], y.to(device, non_blocking=True)

    seconds = {"start": 0.0, "first_step": 0.0, "train": 0.0, "validate": 0.0}
    seconds["start"] = time.time() - STARTED
    top1, step, images, accuracies = 0.0, 0, 0, []
    for epoch in range(args.epochs):
        net.train()
        begun = time.perf_counter()
        losses = torch.zeros((), device=device)
        for batch in loader:
            x, y = sent(*batch)
            for group in optimizer.param_groups:
                group["lr"] = group["factor"] * rate(step, total, warmup, peak)
            cast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
            losses += update(forward, optimizer, x, y, cast, args.label_smoothing).detach()
            if not step:
                losses.item()
                seconds["first_step"] = time.perf_counter() - begun
                begun = time.perf_counter()
            else:
                images += len(y)
            step += 1
        mean_loss = losses.item() / len(loader)
        seconds["train"] += time.perf_counter() - begun
        if args.validate == "end" and epoch + 1 < args.epochs:
            print(f"epoch {epoch + 1}/{args.epochs}  loss {mean_loss:.4f}", flush=True)
            continue
        begun = time.perf_counter()
        net.eval()  # not the compiled one: it would be compiled once more for this, and again for the last batch
        hits = torch.zeros((), device=device, dtype=torch.int64)
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
            for batch in valid_loader:
                x, y = sent(*batch)
                hits += (net(x).argmax(1) == y).sum()
        top1 = hits.item() / len(valid_set)
        accuracies.append(top1)
        seconds["validate"] += time.perf_counter() - begun
        print(f"epoch {epoch + 1}/{args.epochs}  loss {mean_loss:.4f}  top-1 {100 * top1:.2f} %", flush=True)
    torch.save(net.state_dict(), args.save)
    rest = {"top1": top1, "best_top1": max(accuracies), "images_per_second": images / seconds["train"]}
    print(json.dumps(rest | {"seconds": seconds, "wall_inside": time.time() - STARTED, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
