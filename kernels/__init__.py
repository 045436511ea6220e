"""The fused operations of a BERT encoder, one a file; imports torch (and triton) only.

Shape letters, the same in every file: B sequences of a micro-batch, T tokens of all of them in one
row, P masked positions, S sequence length, D hidden, F intermediate, N heads, H head size, V vocabulary.

Every operation's file reads in one order: what is computed and what is kept for backward, a plain PyTorch
reference, the public function, which checks its arguments and calls. Statistics, softmax and losses
are taken in fp32 (fp64 for fp64 input), whatever the dtype of the tensors.
"""
