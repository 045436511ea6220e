"""The fused operations of a BERT encoder, one per file. The package imports only torch and triton.

Every file uses the same shape letters: B sequences in a micro-batch, T tokens of all of them laid end to
end, P masked positions, S sequence length, D hidden, F intermediate, N heads, H head size, V vocabulary.

Every operation's file has the same order: a docstring that says what is computed and what is kept for
backward, a plain PyTorch reference, the Triton kernels, and the public function, which checks its
arguments and runs one of the two. Statistics, softmax and losses are computed in fp32 (fp64 for fp64
input), whatever the dtype of the tensors.
"""
