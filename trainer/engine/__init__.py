"""Everything behind an optimizer step: DeepSpeed ZeRO, LAMB and Adam, the loss scale, the learning rate."""
