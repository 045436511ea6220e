"""The parts of a step, and which part each kernel belongs to. No other file looks at the names of kernels.

A kernel counts towards the first part that has a mark in its name. Lambert's own kernels have names like
``_layer_norm_forward_kernel``; PyTorch, cuBLAS, cuDNN and NCCL have theirs. On CPUs the marks are found in the names of
PyTorch's operations, such as ``aten::linear`` and ``autograd::engine::evaluate_function: GeluBackward0``.
"""

from __future__ import annotations

PRODUCTS, ATTENTION, LAYER_NORM, GELU = "matrix products", "attention", "LayerNorm", "GELU"
EMBEDDING, HEADS, SUMS, OTHER = "embedding", "heads and loss", "sums of gradients", "other in the model"
ACCUMULATION, REDUCTION, OPTIMIZER = "accumulation", "reduction", "optimizer"
COPIES, BETWEEN = "copies", "between steps"
LOSS = "cross-entropy"  # a part of HEADS
# all parts, in the order of the table
PARTS = (
    *(PRODUCTS, ATTENTION, LAYER_NORM, GELU, EMBEDDING, SUMS, HEADS, OTHER),
    *(ACCUMULATION, REDUCTION, OPTIMIZER, COPIES, BETWEEN),
)

# substrings of lower-case names, by part; earlier parts come first
NAME_MARKS = {
    REDUCTION: ("nccl", "gloo", "c10d::"),
    LOSS: ("cross_entropy", "nll_loss", "nllloss", "log_softmax", "logsoftmax"),
    ATTENTION: ("attention", "fmha", "flash", "sdpa", "softmax", "bmm", "::matmul"),
    LAYER_NORM: ("layer_norm", "layernorm"),
    GELU: ("gelu",),
    EMBEDDING: ("embedding", "embed_"),
    SUMS: ("add_partials",),
    ACCUMULATION: ("accumulate_kernel", "accumulategrad"),
    OPTIMIZER: ("_adam_kernel", "_lamb_", "square_sum", "tensor_sums", "multi_tensor_apply"),
    PRODUCTS: (
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "xmma",
        "cublas",
        "splitk",
        "mmbackward",
        "::linear",
        "::addmm",
        "::mm",
    ),
}
COPY_CATEGORIES = ("gpu_memcpy", "gpu_memset")  # of events in a trace


def kernel_part(name: str) -> str | None:
    """The part that the name of a kernel or an operation stands for; None if it could belong to any."""
    lower = name.lower()
    return next((part for part, marks in NAME_MARKS.items() if any(mark in lower for mark in marks)), None)
