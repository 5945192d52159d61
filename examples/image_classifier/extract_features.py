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

PARTS = ("train", "held_out")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="as for train_classifier.py")
    parser.add_argument("--model", default="classifier.pt", help="what it wrote (default classifier.pt)")
    parser.add_argument("--image_size", type=int, default=224, help="pixels across and down (default 224)")
    parser.add_argument("--batch_size", type=int, default=32, help="images at a time (default 32)")
    parser.add_argument("--num_workers", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--out", type=Path, help="a folder (default features_SIZE)")
    args = parser.parse_args(argv)
    if args.image_size < STRIDE or args.batch_size < 1 or args.num_workers < 0:
        parser.error(f"--image_size must be at least {STRIDE}, --batch_size 1, --num_workers 0")
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
        parser.error(f"--model {args.model}: it is no whole classifier ({type(problem).__name__})")
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
        print(f"{path}: {features.shape[0]} images, {features.shape[1]} places, {features.shape[2]} numbers")


if __name__ == "__main__":
    main()
