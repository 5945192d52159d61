"""Writes what a trained classifier sees in every image, for train_transformer.py.

    python extract_features.py --data_dir datas --model classifier.pt --image_size 224 --out features_224

FOLDER/train.h5 and FOLDER/held_out.h5 hold ``features`` (images, places, numbers) and ``labels``, uncompressed, so that
any number of trainings can map them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import torch
from images import Images
from networks import STRIDE, Classifier

import legroom
from legroom.messages import either

PARTS = ("train", "held_out")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Write a classifier's features of every image.", "写出分类器对每张图像的特征。")
    )
    add = parser.add_argument
    add("--data_dir", type=Path, required=True, help=either("as for train_classifier.py", "同 train_classifier.py"))
    add(
        "--model",
        default="classifier.pt",
        help=either("what it wrote (default classifier.pt)", "分类器（默认 classifier.pt）"),
    )
    add(
        "--image_size",
        type=int,
        default=224,
        help=either("pixels across and down (default 224)", "图像边长（默认 224）"),
    )
    add("--batch_size", type=int, default=32, help=either("images per batch (default 32)", "批大小（默认 32）"))
    add("--num_workers", type=int, default=2, help=either("worker processes (default 2)", "worker 进程数（默认 2）"))
    add("--out", type=Path, help=either("a folder (default features_SIZE)", "输出目录（默认 features_边长）"))
    args = parser.parse_args(argv)
    if args.image_size < STRIDE or args.batch_size < 1 or args.num_workers < 0:
        parser.error(
            either(
                f"--image_size must be at least {STRIDE}, --batch_size 1, --num_workers 0",
                f"--image_size 至少为 {STRIDE}，--batch_size 至少为 1，--num_workers 至少为 0",
            )
        )
    out = args.out or Path(f"features_{args.image_size}")
    try:
        parts = {name: Images(args.data_dir, args.image_size, held_out=name == "held_out") for name in PARTS}
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(str(problem))
    try:
        state = torch.load(args.model, map_location="cpu", weights_only=True)
        model = Classifier(len(state["classes"]))
        model.load_state_dict(state["model"])
    except OSError as problem:
        parser.error(f"--model {args.model}: {problem.strerror}")
    except Exception as problem:  # torn, another model's: torch has an error for each
        parser.error(
            either(
                f"--model {args.model}: not a whole classifier ({type(problem).__name__})",
                f"--model {args.model}：不是完整的分类器（{type(problem).__name__}）",
            )
        )
    for name, images in parts.items():
        extract(model.eval(), images, out / f"{name}.h5", args)


def extract(model: Classifier, images: Images, path: Path, args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    loader = legroom.DataLoader(images, args.batch_size, num_workers=args.num_workers)
    with h5py.File(path, "w") as file, torch.no_grad():
        at = 0
        for batch, labels in loader:
            found = model.features(batch.to(device)).cpu().numpy()
            if at == 0:
                features = file.create_dataset("features", (len(images), *found.shape[1:]), found.dtype)
                numbers = file.create_dataset("labels", len(images), "int64")
            features[at : at + len(found)], numbers[at : at + len(found)] = found, labels.numpy()
            at += len(found)
        file.attrs["classes"] = images.classes
        images_count, places, numbers_each = features.shape
        print(
            either(
                f"{path}: {images_count} images, {places} places, {numbers_each} numbers",
                f"{path}：{images_count} 张图像，每张 {places} 个位置，每个位置 {numbers_each} 个数",
            )
        )


if __name__ == "__main__":
    main()
