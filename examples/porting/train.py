"""Steps 2 and 3, after: the same network trained by Headrace, on one device, then on stages x replicas.

python examples/porting/train.py
python examples/porting/train.py --stages 4 --replicas 2
python examples/porting/train.py --stages 4 --replicas 2 --model nnx        (or equinox)
"""

from importlib import import_module

import cifar10

from headrace import Model

parser = cifar10.options(__doc__)
parser.add_argument("--model", choices=("linen", "nnx", "equinox"), default="linen", help="[linen]")
parser.add_argument("--stages", type=int, default=1, help="pipeline stages, each on its own device [1]")
parser.add_argument("--replicas", type=int, default=1, help="copies of the network [1]")
parser.add_argument("--micro-batch", type=int, default=8, help="images that a stage computes at once [8]")
args = parser.parse_args()
images, labels, test_images, test_labels = cifar10.load(args)

model = Model(
    import_module(f"{args.model}_model").blocks(num_classes=10),
    input_shape=(32, 32, 3),
    num_classes=10,
    class_names=cifar10.CLASS_NAMES,
    name=f"small_efficientnet_{args.model}",
    config="none",  # no recipe: only what is named here
    num_pipeline_stages=args.stages,
    num_replicas=args.replicas,
    micro_batch_size=args.micro_batch,
    gradient_accumulation_count=args.batch // (args.micro_batch * args.replicas),
    num_epochs=args.epochs,
    optimizer="sgd",
    optimizer_params={"momentum": 0.9},
    lr_schedule_params={"initial_learning_rate": 0.1 / args.batch},  # per image
)
print(model.plan(num_samples=len(images), num_validation=len(test_images)))

run = model.fit(images, labels, validation_data=(test_images, test_labels))

report = model.evaluate(test_images, test_labels)
print(f"{report['num_samples']} images, top-1 {report['top1']:.3f}")
print(f"python examples/porting/infer.py --model {args.model} {run.directory}")
