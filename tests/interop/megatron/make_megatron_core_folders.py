"""Writes megatron_core_folders.tar.xz: folders that Megatron-LM saved, its logits, and the moments of its optimizer.

Run with megatron-core 0.19.2 and torch 2.15, on a CPU:

    python tests/interop/megatron/make_megatron_core_folders.py

Models are built, trained and saved by Megatron-LM's own code, with its arguments. What asks for a GPU is
replaced: tensors on `cuda` are on the CPU, random number states are zeros, and layers are those of plain torch.
"""

import contextlib
import hashlib
import io
import json
import os
import socket
import sys
import tarfile
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).parent / "megatron_core_folders.tar.xz"
STEPS, SAMPLES, TOKENS = 2, 2, 31
MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--tokenizer-type NullTokenizer --vocab-size 31 --make-vocab-size-divisible-by 32 --ffn-hidden-size 12 "
    "--transformer-impl local --hidden-dropout 0 --attention-dropout 0 --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-rope-fusion --no-masked-softmax-fusion "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-2 --mock-data --eval-iters 0 --save-interval 5 "
    "--ckpt-format torch_dist --distributed-backend gloo"
)
LLAMA = (
    "--swiglu --position-embedding-type rope --normalization RMSNorm --group-query-attention --num-query-groups 1 "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
CASES = {
    "gpt_tensor_2": (2, "--tensor-model-parallel-size 2 --no-save-optim --no-save-rng"),
    "llama": (1, LLAMA),
    "llama_bf16": (1, f"{LLAMA} --bf16 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --no-save-rng"),
    "experts": (
        1,
        f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 4 --moe-router-load-balancing-type none "
        "--no-save-optim --no-save-rng",
    ),
}
"""Name -> number of processes, flags."""


def use_the_cpu() -> None:
    """Replaces what Megatron-LM asks of a GPU."""

    def on_the_cpu(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like"):
        setattr(torch, name, on_the_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args, **options: None
    torch.cuda.get_rng_state = lambda *args, **options: torch.zeros(16, dtype=torch.uint8)
    device = SimpleNamespace(major=8, minor=0, name="none", total_memory=1 << 36, multi_processor_count=1)
    torch.cuda.get_device_properties = lambda *args, **options: device
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor
    kind = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *args, **options: (
        kind(tensor, *args, **options) if args or options else kind(tensor).replace("torch.", "torch.cuda.")
    )


def run(rank: int, name: str, port: int, root: str) -> None:
    """Trains and saves a case in one process."""
    use_the_cpu()
    processes, flags = CASES[name]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    os.environ.update(address | {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)})
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.rerun_state_machine import initialize_rerun_state_machine
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.training import checkpointing
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_args

    sys.argv = ["pretrain_gpt.py", *MODEL.split(), *flags.split(), "--save", name]
    args = parse_args()
    args.global_batch_size = 2 * processes // args.tensor_model_parallel_size
    validate_args(args)
    args.padded_vocab_size, args.save = 32, f"{root}/{name}"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=processes)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_model_parallel_size)
    set_args(args)
    initialize_rng_tracker(force_reset=True)
    type(tensor_parallel.get_cuda_rng_tracker()).fork = lambda *args, **options: contextlib.nullcontext()
    initialize_rerun_state_machine()
    model, optimizer, schedule = trained(args)
    tokens = tokens_of(args)
    with torch.no_grad():
        results = {"tokens": tokens.numpy(), "logits": logits_of(model, tokens).float().numpy()}
    if name == "llama":
        for weight_name, weight in model.module.named_parameters():
            moments = optimizer.optimizer.state[weight]
            results |= {f"{kind}/{weight_name}": moments[kind].numpy() for kind in ("exp_avg", "exp_avg_sq")}
    args.iteration, args.consumed_train_samples = STEPS, STEPS * SAMPLES
    checkpointing.save_checkpoint(STEPS, [model], optimizer, schedule, 0)
    if rank == 0:
        np.savez(f"{root}/{name}/results.npz", **results)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def trained(args: Any) -> tuple[Any, Any, Any]:
    """The model, its optimizer and its schedule; after some steps if the optimizer is saved."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module
    from megatron.training.argument_utils import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    else:
        spec = get_gpt_layer_local_spec(normalization=args.normalization)
    model = GPTModel(
        config, spec, args.padded_vocab_size, args.max_position_embeddings, parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = np.random.RandomState(zlib.crc32(name.encode())).randint(-12, 13, tuple(weight.shape)) / 32
            weight.copy_(torch.from_numpy(draw + ("norm" in name and name.endswith("weight"))))
    if args.bf16:
        model = Float16Module(config, model)
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=True
    )
    model = DistributedDataParallel(config, reduction, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=args.lr, min_lr=0.0, weight_decay=0.1, bf16=args.bf16, params_dtype=args.params_dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=20,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=20, wd_incr_style="constant",
    )  # fmt: skip
    tokens = tokens_of(args)
    for _ in range(0 if args.no_save_optim else STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        logits = logits_of(model, tokens).float().flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, torch.roll(tokens, -1, 1).flatten()).backward()
        optimizer.step()
        schedule.step(increment=SAMPLES)
    return model, optimizer, schedule


def tokens_of(args: Any) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(7).randint(0, TOKENS, (SAMPLES, args.seq_length)))


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    length = tokens.shape[1]
    masked = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    return model(tokens, torch.arange(length).expand(len(tokens), -1), masked)


def pack(root: str) -> None:
    """Writes the archive of all files of a folder, and a file with its checksum and the versions."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz", preset=9) as tar:
        for path in sorted(path for path in Path(root).rglob("*") if path.is_file()):
            tar.add(path, str(path.relative_to(root)))
    FILE.write_bytes(archive.getvalue())
    facts = {"sha256": hashlib.sha256(archive.getvalue()).hexdigest()}
    facts |= {package: version(package) for package in ("megatron-core", "torch")}
    FILE.with_suffix("").with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for name, (processes, _) in CASES.items():
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            torch.multiprocessing.spawn(run, args=(name, port, root), nprocs=processes)
        pack(root)


if __name__ == "__main__":
    main()
