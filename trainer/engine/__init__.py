"""One optimizer step: DeepSpeed ZeRO, LAMB and Adam, the loss scale and the learning rate."""
