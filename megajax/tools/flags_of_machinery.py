"""Megatron-LM's flags about kernels, communication, checkpoints, services and its own code: one answer a group."""

from megajax.tools.flags import Flag, flags, needless, refused
from megajax.tools.flags_of_models import FLOAT32, FREE_KERNEL, FUSED
from megajax.tools.flags_of_operations import METRICS, NO_WARM_START, ONE_LOGGER, ORBAX
from megajax.tools.flags_of_runs import BUCKETS, HIDDEN, INDEX, NO_FP4, NVIDIA_NETWORK

ONE_PROGRAM = "a step is one compiled program"
NO_RECIPE = "recipes of single layers and other quantisation libraries are not in this version: precision.fp8 is"
NO_ATTENTION_8 = "attention and its cache of activations are not in 8 bits: precision.fp8 is about matmuls with weights"
DEFAULT = "it is what happens anyway; the flag with --no- or --disable- in front decides"
RESTART = "a process does not restart itself; python -m megajax.launch starts a failed run again: docs/launch.md"
RESTART_DETAIL = "has an effect with --inprocess-restart alone, which is refused"
TELEMETRY = "spans of a step are in trace.json and in profile.steps: docs/logging.md"
PYTORCH = "a debugging aid of PyTorch's"
HOST_MEMORY = "the compiler orders copies to host memory: model.offload and optimizer.offload say what moves"
OFFLOAD_BY_NAME = "name what moves to host memory in model.offload"
REMAT_GROUPS = "weights are cut and gathered again by parallel.data_sharding=fsdp"
FSDP_DETAIL = "a detail of Megatron-FSDP's buffers; numbers do not depend on it"
STRAGGLER = "has an effect with --log-straggler alone, which is refused"
NO_DUMPS = "tensors inside a step are not written down: profile.steps and the norms in metrics.jsonl are"
WHOLE_STATE = "whole states are saved and loaded always"
PREPARED = "training reads token files, which were tokenized before: docs/preprocess.md"
NOT_A_FLAG = "Megatron-LM's code sets it from other flags; a command line cannot"

KERNELS: tuple[Flag, ...] = (
    *flags(
        needless(FUSED),
        """
        apply-rope-fusion bias-activation-fusion bias-dropout-fusion fused-residual-rmsnorm fused-single-qkv-rope
        masked-softmax-fusion mla-down-proj-fusion persist-layer-norm disable-jit-fuser use-flashinfer-fused-rope
        use-fused-weighted-squared-relu use-transformer-engine-op-fuser
        """,
    ),
    *flags(needless(FREE_KERNEL), "flash-attention-version muon-use-syrk use-grouped-gemm-for-dense-mlp"),
    *flags(needless(FLOAT32), "output-logit-dtype"),
    *flags(
        needless(ONE_PROGRAM),
        """
        cuda-graph-modules cuda-graph-retain-backward-graph cuda-graph-use-single-mempool optimizer-cuda-graph
        delay-offload-until-cuda-graph use-te-rng-tracker clone-scatter-output-in-embedding deallocate-pipeline-outputs
        """,
    ),
    *flags(
        needless("it saves memory and changes no number; model.recompute does so here"),
        "memory-efficient-layer-norm mlp-chunks-for-training",
    ),
    *flags(
        refused("every microbatch keeps the same tensors: model.recompute"),
        "num-microbatches-with-partial-activation-checkpoints",
    ),
    *flags(
        refused("kernels are not chosen to be independent of the batch; xla.deterministic repeats a run bit by bit"),
        "batch-invariant-backend batch-invariant-mode",
    ),
    *flags(
        refused(NO_RECIPE),
        """
        kitchen-attention-backend kitchen-config-file kitchen-recipe-number quant-recipe te-precision-config-file
        use-kitchen use-kitchen-attention fp8-quantizer-factory
        """,
    ),
    *flags(refused(NO_FP4), "fp4-quantizer-factory"),
    *flags(
        refused(NO_ATTENTION_8),
        "activation-func-fp8-input-store fp8-dot-product-attention fp8-multi-head-attention fp8-output-proj",
    ),
    *flags(refused("a tensor's largest value is taken over all devices that hold a part of it"), "tp-only-amax-red"),
    *flags(
        needless("matmul operands in 8 bits are laid out by the compiler"),
        "disable-parameter-transpose-cache keep-fp8-transpose-cache",
    ),
    *flags(refused("MXFP8 is not in this version: --fp8-recipe tensorwise"), "reuse-grad-buf-for-mxfp8-param-ag"),
    *flags(
        needless(HOST_MEMORY),
        """
        activation-offload-fraction delta-offload-bytes-across-pp-ranks fine-grained-offloading-max-inflight-offloads
        min-offloaded-tensor-size no-pin-cpu-grads no-pin-cpu-params use-torch-optimizer-for-cpu-offload
        """,
    ),
    *flags(
        refused(OFFLOAD_BY_NAME),
        """
        cpu-offloading cpu-offloading-activations cpu-offloading-double-buffering
        cpu-offloading-retain-pinned-cpu-buffers cpu-offloading-weights
        """,
    ),
)

COMMUNICATION: tuple[Flag, ...] = (
    *flags(
        needless(HIDDEN),
        """
        align-grad-reduce batch-p2p-comm batch-p2p-sync overlap-p2p-comm overlap-p2p-comm-warmup-flush
        tp-comm-atomic-ag tp-comm-atomic-rs tp-comm-bulk-dgrad tp-comm-bulk-wgrad tp-comm-overlap-ag
        tp-comm-overlap-disable-fc1 tp-comm-overlap-disable-qkv tp-comm-overlap-rs tp-comm-split-ag tp-comm-split-rs
        """,
    ),
    *flags(needless("microbatches add up in the compiled program"), "gradient-accumulation-fusion"),
    *flags(
        needless(NVIDIA_NETWORK),
        """
        disable-symmetric-registration fsdp-manual-registration gtp-remat-nccl-ub
        pipeline-model-parallel-comm-backend sharp-enabled-group
        """,
    ),
    *flags(needless("there are no process groups"), "create-all-gather-group use-gloo-process-groups"),
    *flags(needless(BUCKETS), "no-use-layer-wise-param-layout"),
    *flags(
        needless(FSDP_DETAIL),
        """
        fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-enable-fine-grained-param-gather
        megatron-fsdp-max-pool-double-buffer megatron-fsdp-version
        """,
    ),
    *flags(
        refused("the optimizer works on float32 weights and gradients: precision.gradients says what is reduced"),
        """
        megatron-fsdp-grad-comm-dtype=fp32 megatron-fsdp-main-grads-dtype=fp32 megatron-fsdp-main-params-dtype=fp32
        ddp-param-name-patterns-for-fp32-local-accumulation
        """,
    ),
    *flags(refused("one group of devices shares all"), "enable-full-sharding-in-hsdp"),
    *flags(
        refused(REMAT_GROUPS),
        """
        gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation gtp-weight-remat-size
        tensor-parallel-num-weight-shards
        """,
    ),
    *flags(needless("rows of a run have one length"), "variable-seq-lengths"),
)

CHECKPOINT_MACHINERY: tuple[Flag, ...] = (
    *flags(
        needless(ORBAX),
        """
        async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm async-strategy
        ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state
        ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
        ckpt-pg-tensors-cache-path dist-ckpt-save-pre-mcore-014 dist-ckpt-workers fully-parallel-load
        fully-parallel-save hetereogenous-dist-checkpoint
        """,
    ),
    *flags(
        needless("what does not fit is always an error; every file has a checksum"),
        "ckpt-load-validate-sharding-integrity strict-fsdp-dtensor-load verify-integrity",
    ),
    *flags(needless(WHOLE_STATE), "load-optim load-rng save-optim save-rng"),
    *flags(refused(NO_WARM_START), "load-main-params-from-ckpt"),
    *flags(refused("a checkpoint's step is the one it was saved at: leave it out"), "override-ckpt-iteration"),
    *flags(needless("config.yaml in the run's folder has all settings"), "save-config-filepath"),
    *flags(needless("the tokenizer is always the config's"), "use-tokenizer-model-from-checkpoint-args"),
)

DATA_MACHINERY: tuple[Flag, ...] = (
    *flags(needless(INDEX), "per-dataset-sequences-path"),
    *flags(needless("files are read by their paths; a URL of object storage is an error"), "disable-msc enable-msc"),
    *flags(
        refused("a run reads one blend from beginning to end: start the next phase from checkpoint.load"),
        "phase-transition-iterations",
    ),
    *flags(
        needless(PREPARED),
        """
        metadata-path save-tokenizer-assets tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast
        tokenizer-sentencepiece-ignore-extra-whitespaces tokenizer-sentencepiece-legacy use-gigatoken
        """,
    ),
    *flags(refused("special tokens are those of the tokenizer's own file"), "special-tokens"),
    *flags(refused("fine-tuning on conversations is not in this version"), "chat-template"),
    *flags(refused("padding is what the data's end leaves, and counts for nothing"), "null-tokenizer-pad-id=-1"),
    *flags(needless("a validation set is called after its file"), "validation-set-names"),
    *flags(needless("model.vocabulary_multiple says what it is padded to"), "pad-vocab-size"),
)

SERVICES: tuple[Flag, ...] = (
    *flags(refused(RESTART), "inprocess-restart"),
    *flags(
        needless(RESTART_DETAIL),
        """
        inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache
        inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
        inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
        inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-soft-timeout
        inprocess-termination-grace-time
        """,
    ),
    *flags(refused("megajax.launch supervises runs: docs/launch.md"), "calc-ft-timeouts ft-num-warmup-iters"),
    *flags(needless(ONE_LOGGER), "app-tag-run-name app-tag-run-version one-logger-async run-workload-inspector-server"),
    *flags(needless(TELEMETRY), "otel-enabled otel-service-name otel-span-groups nvtx-ranges"),
    *flags(needless(STRAGGLER), "disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count"),
    *flags(
        refused("devices are not tested within a run; python -m megajax.doctor tests them before"),
        "gpu-sniff-test-interval",
    ),
    *flags(needless("suspicious steps are in events.jsonl: docs/faults.md"), "result-rejected-tracker-filename"),
    *flags(
        needless(PYTORCH),
        """
        flight-recorder-dump-on-timeout flight-recorder-dump-path flight-recorder-extra-dump-on-exec
        flight-recorder-include-only-active flight-recorder-include-stack-trace flight-recorder-trace-buffer-size
        """,
    ),
    *flags(
        needless("there is one profiler, jax's; TensorBoard and xprof show its traces"),
        """
        pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes
        record-shapes use-nsys-profiler
        """,
    ),
    *flags(
        needless(METRICS),
        """
        log-device-memory-used log-memory-interval log-runtime-to-tensorboard log-throughput-to-tensorboard
        memory-keys runtime-time-unit throughput-window-size
        """,
    ),
    *flags(needless("nothing waits for a timer"), "barrier-with-L1-time"),
    *flags(
        refused("one norm of all gradients is logged, and what each weight adds to it is not"),
        "log-l2-norm-grad-to-tensorboard",
    ),
    *flags(refused("kernels do not give scores away: leave it out"), "log-max-attention-logit"),
    *flags(
        refused(NO_DUMPS),
        """
        save-activations-interval save-dgrads-interval save-params-interval save-wgrads-interval
        """,
    ),
    *flags(
        needless("a run prints what the person at the terminal needs"),
        "filter-warnings modules-to-filter set-level-for-all-loggers",
    ),
    *flags(
        needless("SIGTERM, SIGINT and SIGUSR1 all save and end a run"),
        "exit-signal-handler-for-dataloader exit-signal-handler-for-training",
    ),
    *flags(needless("Python's garbage collector does not hold the devices up"), "manual-gc-eval"),
    *flags(needless("a switch of Megatron-LM's own code that guards unfinished features"), "enable-experimental"),
    *flags(needless("optimizer.groups in config.yaml say how weights differ"), "dump-param-to-param-group-map"),
)

OWN_CODE: tuple[Flag, ...] = (
    *flags(
        refused("convert the file's leaves: give megatron_args a file of flags and values, --num-layers as num-layers"),
        "yaml-cfg",
    ),
    *flags(refused("give model.stack.pattern one block per layer"), "heterogeneous-layers-config-encoded-json"),
    *flags(needless(DEFAULT), "add-bias-linear check-for-nan-in-loss fp8-wgrad perform-initialization"),
    *flags(
        needless(NOT_A_FLAG),
        """
        activation-func autocast-dtype embedding-init-method enable-autocast finalize-model-grads-func
        gated-linear-unit grad-scale-func grad-sync-func heterogeneous-block-specs init-method lr-decay-steps
        lr-warmup-steps moe-grad-scale-func mtp-grad-scale-func mup-width-mult no-sync-func output-layer-init-method
        param-sync-func params-dtype pipeline-dtype timers wd-incr-steps wsd-decay-steps cpu-offloading-context
        """,
    ),
)

MACHINERY_FLAGS = (*KERNELS, *COMMUNICATION, *CHECKPOINT_MACHINERY, *DATA_MACHINERY, *SERVICES, *OWN_CODE)
