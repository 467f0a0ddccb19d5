"""ViT (Dosovitskiy et al. 2021) on ImageNet or other images with classes, a function per size. `config()` is vit_b16.

Every size has a debug twin, which learns the directions of synthetic stripes: vit_l14_debug for vit_l14, debug for
`config()`.

Data:     data/imagenet/train/CLASS/*.jpg and data/imagenet/val/CLASS/*.jpg, a folder for each class; for vit_h14 tar
          files, data/imagenet-train-0000.tar to 1023 and data/imagenet-val-00.tar to 63 (docs/data.md)
Run:      python -m megajax.train --config=vit.py
Laptop:   python -m megajax.train --config=vit.py:debug
Hardware: meant for one host of 8 GPUs with 80 GB, not yet run on one
"""

from dataclasses import replace

import megajax as mj

IMAGES = 1_281_167
"""Of ImageNet-1k, whose classes are 1000."""


def config() -> mj.RunConfig:
    """The base size."""
    return vit_b16()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return vit_b16_debug()


def vit_b16() -> mj.RunConfig:
    """12 layers x 768 hidden. 300 epochs in batches of 1024, after Beyer et al. (2022), with a class token."""
    return _imagenet(
        "vit_b16",
        mj.vit("b16"),
        rows=1024,
        micro_size=128,
        optimizer=mj.AdamWConfig(weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=1e-3, warmup_steps=10_000),
        data=mj.ClassFoldersConfig(
            path="data/imagenet", augment=mj.AugmentConfig(area=(0.05, 1.0), colour=0.4), mixup=0.2
        ),
        epochs=300,
    )


def vit_l14() -> mj.RunConfig:
    """24 layers x 1024 hidden. 200 epochs in batches of 4096 (He et al. 2022, table 11). ZeRO-1."""
    data = mj.ClassFoldersConfig(path="data/imagenet", **_STRONG)
    return _imagenet("vit_l14", _smoothed("l14"), parallel=mj.ParallelConfig(), data=data, **_LARGE)


def vit_h14() -> mj.RunConfig:
    """32 layers x 1280 hidden. As vit_l14, with FSDP and images in tar files."""
    train, valid = "data/imagenet-train-{0000..1023}.tar", "data/imagenet-val-{00..63}.tar"
    data = mj.ImageShardsConfig(train_paths=(train,), valid_paths=(valid,), **_STRONG)
    parallel = mj.ParallelConfig(data_sharding="fsdp")
    return _imagenet("vit_h14", _smoothed("h14"), parallel=parallel, data=data, **_LARGE)


def vit_b16_debug() -> mj.RunConfig:
    """vit_b16 in a tiny size on synthetic stripes."""
    return _tiny(vit_b16())


def vit_l14_debug() -> mj.RunConfig:
    """vit_l14 in a tiny size on synthetic stripes."""
    return _tiny(vit_l14())


def vit_h14_debug() -> mj.RunConfig:
    """vit_h14 in a tiny size on synthetic stripes."""
    return _tiny(vit_h14())


_LARGE = {
    "rows": 4096,
    "micro_size": 64,
    "optimizer": mj.AdamWConfig(beta2=0.95, weight_decay=0.3),
    "schedule": mj.ScheduleConfig(lr=1.6e-3, warmup_steps=6250),
    "epochs": 200,
}
_STRONG = {"augment": mj.AugmentConfig(colour=0.4), "mixup": 0.8}


def _smoothed(size: str) -> mj.ViTConfig:
    model = mj.vit(size)
    return replace(model, head=replace(model.head, label_smoothing=0.1))


def _tiny(run: mj.RunConfig) -> mj.RunConfig:
    """The same tree in a tiny size, in the same layout."""
    model = replace(mj.vit("debug", classes=10, image=16), patch=4, init_std=0.08)
    return mj.debug_config(
        run,
        model,
        parallel=run.parallel,
        data=mj.MockImagesConfig(),
        schedule=mj.ScheduleConfig(lr=2e-3, warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=64, micro_size=8),
        evaluation=mj.EvaluationConfig(every=200, batches=8),
        checkpoint=mj.CheckpointConfig(every=400),
        logging=replace(run.logging, every=100),
        steps=800,
    )


def _imagenet(
    name: str,
    model: mj.ViTConfig,
    *,
    rows: int,
    micro_size: int,
    optimizer: mj.AdamWConfig,
    schedule: mj.ScheduleConfig,
    data: mj.ClassFoldersConfig | mj.ImageShardsConfig,
    epochs: int,
    parallel: mj.ParallelConfig | None = None,
) -> mj.RunConfig:
    return mj.RunConfig(
        model=model,
        parallel=parallel or mj.ParallelConfig(data_sharding="replicate"),
        data=data,
        optimizer=optimizer,
        schedule=schedule,
        batch=mj.BatchConfig(global_size=rows, micro_size=micro_size),
        evaluation=mj.EvaluationConfig(every=5000, full=True),
        checkpoint=mj.CheckpointConfig(every=2500),
        steps=epochs * IMAGES // rows,
        run_dir=f"runs/{name}",
    )
